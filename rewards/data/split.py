"""Which problems are held out, and which are for validation: decided by the solution alone, the same in every run."""

from __future__ import annotations

import hashlib
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rewards.problem import Split

# Changing one moves problems across the split, and so spoils every comparison with earlier runs.
_SALT = "d1-split-1"
_VALIDATION_SALT = "d1-validation-1"


class SplitConfig(BaseModel):
    """What the configs of all tasks have in common: what is kept from training beside the held-out problems."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    validation_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Fraction of the solutions that are not held out that is for validation (`evaluation.num_validation`) instead of
    training."""

    @property
    def longest_grade_s(self) -> float:
        """Seconds that the grading of one completion may take, where its text decides that, as what runs it or compares
        it is stopped by limits of its own; 0 where grading is reading."""
        return 0.0


def is_heldout(key: str, fraction: float) -> bool:
    """Whether the solution named `key` belongs to the held-out split, into which about `fraction` of all keys fall.

    A pure function of its arguments: it depends on no seed, process or Python version. Every key that is held out at
    one fraction is held out at each larger one.
    """
    return _is_among(key, fraction, _SALT)


def split_of(key: str, heldout_fraction: float, validation_fraction: float = 0.0) -> Split:
    """The split of the solution named `key`, as `is_heldout`; of what is left a fraction is for validation."""
    if is_heldout(key, heldout_fraction):
        return Split.HELDOUT
    return kept_split_of(key, validation_fraction)


def kept_split_of(key: str, validation_fraction: float) -> Split:
    """The same of a solution that is known not to be held out."""
    return Split.VALIDATION if _is_among(key, validation_fraction, _VALIDATION_SALT) else Split.TRAIN


def _is_among(key: str, fraction: float, salt: str) -> bool:
    digest = hashlib.sha256(f"{salt}/{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64
