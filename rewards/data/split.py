"""Assignment of problems to splits by a hash of their solution or question, equal in every run."""

from __future__ import annotations

import hashlib
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rewards.problem import Split

# Changing one moves problems between splits, which invalidates every comparison with earlier runs.
_SALT = "d1-split-1"
_VALIDATION_SALT = "d1-validation-1"


class SplitConfig(BaseModel):
    """Settings common to all tasks: how much is kept from training, besides the held-out problems."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    validation_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Fraction of what is not held out that is used for validation (`evaluation.num_validation`) instead of training,
    by solution or question."""

    @property
    def max_grading_s(self) -> float:
        """Maximum seconds to grade one completion, for graders that execute or compare it under limits. 0 if grading is
        only parsing."""
        return 0.0


def is_heldout(key: str, fraction: float) -> bool:
    """Return whether the solution or question `key` is held out; about `fraction` of all keys are.

    A pure function of its arguments: it depends on no seed, process or Python version. Every key that is held out at
    one fraction is held out at each larger one.
    """
    return _is_among(key, fraction, _SALT)


def split_of(key: str, heldout_fraction: float, validation_fraction: float = 0.0) -> Split:
    """Return the split of the solution or question `key`. Of the keys that are not held out, a fraction is for
    validation."""
    if is_heldout(key, heldout_fraction):
        return Split.HELDOUT
    return train_or_validation(key, validation_fraction)


def train_or_validation(key: str, validation_fraction: float) -> Split:
    """Return the split of a key that is known not to be held out."""
    return Split.VALIDATION if _is_among(key, validation_fraction, _VALIDATION_SALT) else Split.TRAIN


def _is_among(key: str, fraction: float, salt: str) -> bool:
    digest = hashlib.sha256(f"{salt}/{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64
