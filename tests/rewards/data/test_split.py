"""The split is a fixed function of the key."""

from __future__ import annotations

from rewards.data.split import is_heldout, split_of
from rewards.problem import Split


def test_the_split_never_changes() -> None:
    # Pinned: other values would put problems that earlier runs trained on into the held-out split.
    heldout = [n for n in range(60) if is_heldout(f"sums/{n}", 0.2)]
    assert heldout == [13, 14, 16, 19, 27, 34, 37, 45, 50, 57, 59]


def test_the_fraction_is_kept_and_larger_fractions_hold_out_more() -> None:
    keys = [f"key/{n}" for n in range(10_000)]
    small, large = ({key for key in keys if is_heldout(key, fraction)} for fraction in (0.1, 0.3))
    assert 900 < len(small) < 1_100
    assert 2_850 < len(large) < 3_150
    assert small < large


def test_split_of_names_the_split() -> None:
    assert split_of("key", 0.0) == Split.TRAIN
    assert split_of("key", 1.0) == Split.HELDOUT
