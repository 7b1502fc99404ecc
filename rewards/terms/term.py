"""What a term of a reward is: a number for each sample, added to the task's reward under a name of its own."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field

from rewards.sample import Sample

Finite = Annotated[float, Field(allow_inf_nan=False)]
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class RewardUnavailableError(Exception):
    """What a reward depends on does not answer, or refuses us: that says nothing about any completion.

    A run waits until it answers. The message is one sentence for the person who can bring it back.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class NoValue:
    """Instead of a number: what went wrong with one sample."""

    detail: str
    """One sentence."""


Value = float | NoValue


class Term(Protocol):
    """A term at work."""

    def values(self, samples: Sequence[Sample]) -> list[Value]:
        """The term's value of each sample, in their order.

        Raises RewardUnavailableError when what it asks does not answer.
        """
        ...

    def take_costs(self) -> Mapping[str, float]:
        """What was spent since the last call, by name; empty for a term that spends nothing."""
        ...


class TermConfig(BaseModel):
    """What every term has."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    weight: Finite = 1.0
    """What the term's values are multiplied by."""

    def check(self) -> None:
        """Raise ValueError, in one sentence, when the term cannot work here."""

    def resolved(self) -> Self:
        """The same with absolute paths: graders may run in another directory."""
        return self


def as_value(given: object, source: str) -> Value:
    """What code that is not ours gave as a value: a finite number, else `NoValue` with what `source` gave instead."""
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
    """The value of an environment variable that holds a secret; None where none is named.

    Raises ValueError when it is not set.
    """
    if variable is None:
        return None
    if not (value := os.environ.get(variable)):
        raise ValueError(f"the environment variable {variable} is not set; graders read a secret from it")
    return value
