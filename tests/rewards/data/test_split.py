"""Tests of the data split, a fixed function of the key."""

from __future__ import annotations

from rewards.data.split import is_heldout, split_of
from rewards.problem import Split


def test_the_split_never_changes() -> None:
    # Pinned: other values would move training problems of earlier runs into the held-out split.
    heldout = [n for n in range(60) if is_heldout(f"sums/{n}", 0.2)]
    assert heldout == [13, 14, 16, 19, 27, 34, 37, 45, 50, 57, 59]


def test_held_out_fractions_are_approximate_and_nested() -> None:
    keys = [f"key/{n}" for n in range(10_000)]
    small, large = ({key for key in keys if is_heldout(key, fraction)} for fraction in (0.1, 0.3))
    assert 900 < len(small) < 1_100
    assert 2_850 < len(large) < 3_150
    assert small < large


def test_split_of_names_the_split() -> None:
    assert split_of("key", 0.0) == Split.TRAIN
    assert split_of("key", 1.0) == Split.HELDOUT
    assert split_of("key", 0.0, 1.0) == Split.VALIDATION
    assert split_of("key", 1.0, 1.0) == Split.HELDOUT


def test_validation_is_a_fraction_of_the_training_keys() -> None:
    keys = [f"key/{n}" for n in range(10_000)]
    splits = {key: split_of(key, 0.3, 0.2) for key in keys}
    assert {key for key in keys if splits[key] is Split.HELDOUT} == {key for key in keys if is_heldout(key, 0.3)}
    kept = [key for key in keys if splits[key] is not Split.HELDOUT]
    assert 0.18 < sum(splits[key] is Split.VALIDATION for key in kept) / len(kept) < 0.22


def test_the_validation_split_never_changes() -> None:
    # Pinned for the same reason as the held-out split.
    validation = [n for n in range(60) if split_of(f"sums/{n}", 0.2, 0.2) is Split.VALIDATION]
    assert validation == [10, 18, 21, 22, 31, 39]
