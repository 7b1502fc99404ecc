"""Reward term computed by a Python function of the recipe's author."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from rewards.problem import Message, Problem
from rewards.sample import Sample
from rewards.terms.term import NoValue, TermConfig, Value, as_value

_NO_SAMPLE = Sample(
    problem=Problem(problem_id="", messages=(Message(role="user", content=""),), answer="", reference_completion=""),
    text="",
    num_tokens=1,
    num_forwards=1,
    max_tokens=1,
    is_truncated=False,
)


class FunctionConfig(TermConfig):
    """A Python function, called once for each sample in the graders' processes."""

    takes_arguments: ClassVar[bool] = True

    kind: Literal["function"] = "function"
    """Selects this term."""
    path: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
    """`package.module:function`. It is called with the keyword arguments `problem_id`, `messages`, `completion`,
    `answer`, `metadata`, `num_tokens`, `num_forwards`, `is_truncated` and `blocks`. It returns a number, a list with
    one for each of the blocks, or None if it has no value."""
    directory: Path = Path()
    """Directory that is searched for the module after the installed ones; by default the one where d1 is started. On a
    cluster: a path that exists on all machines."""

    def check(self) -> None:
        """Raise ValueError unless the function can be imported and takes the keyword arguments of a sample."""
        function = load_function(self)
        try:
            inspect.signature(function).bind(**_NO_SAMPLE.reward_arguments())
        except TypeError as error:
            names = ", ".join(_NO_SAMPLE.reward_arguments())
            raise ValueError(
                f"{self.path} does not take what it is called with ({error}); it is given {names}: "
                "name those that it needs, and **rest for the others"
            ) from error

    def resolved(self) -> Self:
        """Return a copy with an absolute directory."""
        return self.model_copy(update={"directory": self.directory.resolve()})


class FunctionTerm:
    """The term of a `FunctionConfig`."""

    def __init__(self, config: FunctionConfig) -> None:
        """Import the function. Raises ValueError if there is no such function."""
        self._path = config.path
        self._function = load_function(config)

    def values(self, samples: Sequence[Sample]) -> list[Value]:
        """Return the function's value for each sample. If it raises, the value is a `NoValue`: the next sample may be
        fine."""
        return [self._value(sample) for sample in samples]

    def take_costs(self) -> Mapping[str, float]:
        """Return no costs."""
        return {}

    def _value(self, sample: Sample) -> Value:
        try:
            given = self._function(**sample.reward_arguments())
        except Exception as error:
            return NoValue(detail=f"{self._path} raised {type(error).__name__}: {error}")
        return as_value(given, self._path, len(sample.blocks))


def load_function(config: FunctionConfig) -> Callable[..., Any]:
    """Import the function of a config. Raises ValueError if there is none.

    Its directory is appended to the import path, so that the author's files never shadow an installed module.
    """
    directory = str(config.directory.resolve())
    if directory not in sys.path:
        sys.path.append(directory)
    try:
        function = pkgutil.resolve_name(config.path)
    except Exception as error:  # Importing runs the module, which may raise anything.
        raise ValueError(
            f"{config.path} cannot be imported, installed or from {directory}: {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise ValueError(f"{config.path} is a {type(function).__name__} and no function")
    return function
