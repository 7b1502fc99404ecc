"""The interface of reward terms: a number for each sample, added to the task's reward as a named part."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, ClassVar, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field

from rewards.sample import Sample

Finite = Annotated[float, Field(allow_inf_nan=False)]
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class RewardUnavailableError(Exception):
    """A service that a reward depends on does not answer, or refuses us; this says nothing about any completion.

    The run waits until it answers. The message is one sentence for the person who can fix it.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class NoValue:
    """Result for a sample whose value could not be computed."""

    detail: str
    """One sentence that says what went wrong."""


@dataclass(frozen=True, slots=True)
class BlockValues:
    """A value for each block of a sample (process rewards); the term's value is their sum."""

    values: tuple[float, ...]
    """By block, in order."""


Value = float | BlockValues | NoValue


class Term(Protocol):
    """A reward term."""

    def values(self, samples: Sequence[Sample]) -> list[Value]:
        """Return the term's value of each sample, in order.

        Raises RewardUnavailableError if a service that it depends on does not answer.
        """
        ...

    def take_costs(self) -> Mapping[str, float]:
        """Return what was spent since the last call, by name; empty for a term without costs."""
        ...


class TermConfig(BaseModel):
    """Settings common to all terms."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    takes_arguments: ClassVar[bool] = False
    """Whether the term receives `Sample.reward_arguments`, and so the texts of blocks."""

    weight: Finite = 1.0
    """Factor applied to the term's values."""

    def check(self) -> None:
        """Raise ValueError if the term cannot work here."""

    def resolved(self) -> Self:
        """Return a copy with absolute paths, since graders may run in another directory."""
        return self


def as_value(given: object, source: str, num_blocks: int) -> Value:
    """Validate a value returned by external code: a finite number, or a list with one for each block of the sample.

    Returns a `NoValue` that says what `source` returned if it is anything else.
    """
    if not isinstance(given, list | tuple):
        return _as_number(given, source)
    if len(given) != num_blocks:
        return NoValue(detail=f"{source} gave {len(given)} numbers for a completion of {num_blocks} blocks")
    numbers = [_as_number(one, source) for one in given]
    missing = next((one for one in numbers if isinstance(one, NoValue)), None)
    return missing or BlockValues(tuple(one for one in numbers if isinstance(one, float)))


def _as_number(given: object, source: str) -> float | NoValue:
    if given is None:
        return NoValue(detail=f"{source} gave no value")
    try:
        value = float(given) if isinstance(given, Real) else math.nan
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        return NoValue(detail=f"{source} gave {repr(given)[:60]} ({type(given).__name__}) and no finite number")
    return value


def secret_of(variable: str | None) -> str | None:
    """Return the value of an environment variable that holds a secret; None if no variable is named.

    Raises ValueError if the variable is not set.
    """
    if variable is None:
        return None
    if not (value := os.environ.get(variable)):
        raise ValueError(f"the environment variable {variable} is not set; graders read a secret from it")
    return value
