"""Which problems are held out: decided by the solution alone, the same in every run."""

from __future__ import annotations

import hashlib

from rewards.problem import Split

# Changing it moves problems across the split, and so spoils every comparison with earlier runs.
_SALT = "d1-split-1"


def is_heldout(key: str, fraction: float) -> bool:
    """Whether the solution named `key` belongs to the held-out split, into which about `fraction` of all keys fall.

    A pure function of its arguments: it depends on no seed, process or Python version. Every key that is held out at
    one fraction is held out at each larger one.
    """
    digest = hashlib.sha256(f"{_SALT}/{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def split_of(key: str, fraction: float) -> Split:
    """The split of the solution named `key`, as `is_heldout`."""
    return Split.HELDOUT if is_heldout(key, fraction) else Split.TRAIN
