"""What a task is: its problems, and how a completion of one is graded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

Rules = Literal["fixed", "d1"]
"""By whose rules a completion is judged. `fixed`: ours. `d1`: the first d1's, its defects included, to compare with."""


class Split(StrEnum):
    """The disjoint parts of a task. No solution of one occurs in another."""

    TRAIN = "train"
    """What is trained on."""
    VALIDATION = "validation"
    """What choices are made by: which checkpoint is the best. Empty unless a config says which fraction it is."""
    HELDOUT = "heldout"
    """The test: what is reported, and nothing is chosen by."""


class Outcome(StrEnum):
    """How grading ended. Only `GRADED` says something about the completion."""

    GRADED = "graded"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    """`user` or `assistant`."""
    content: str
    """Its text, without any template."""


def chat(messages: Iterable[Message]) -> list[dict[str, str]]:
    """A conversation as chat templates, APIs and files have it: `role` and `content` of each turn."""
    return [{"role": message.role, "content": message.content} for message in messages]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One item of a task."""

    problem_id: str
    """Unique in its task; equal for equal problems, whatever the seed that made them."""
    messages: tuple[Message, ...]
    """The conversation that the policy continues."""
    answer: str
    """The reference answer that the grader compares with (a target, a solved grid, ...)."""
    demonstration: str
    """One right completion: the label that SFT trains on. Grading it gives full reward."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What else the grader needs, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """What one completion is worth."""

    reward: float
    """The scalar that the policy gradient uses: the sum of `parts`."""
    parts: Mapping[str, float]
    """Reward by part; every completion that is graded has the same names, and one that is not has none."""
    correct: bool
    """Whether the completion solves the problem: what evaluation counts."""
    outcome: Outcome = Outcome.GRADED
    """How grading ended."""
    answer: str | None = None
    """What was taken as the completion's answer; None when it has none."""
    detail: str = ""
    """What a person should know beside: the first test that failed, what ran out of time."""
    items: tuple[int, int] | None = None
    """How many of how many are right, where accuracy counts the parts of a problem (a Sudoku's empty cells); None where
    it counts the problem."""
    is_zeroed: bool = False
    """Whether the recipe wants it to count as a reward of 0 although it could not be graded (`reward.ungraded`)."""

    @property
    def counts(self) -> bool:
        """Whether its reward takes part in the update: the one place that says so."""
        return self.outcome is Outcome.GRADED or self.is_zeroed

    @property
    def score(self) -> tuple[int, int]:
        """How many right of how many: what an accuracy adds up."""
        return self.items or (int(self.correct), 1)


class Task(Protocol):
    """A source of problems and the one grader that serves reward and evaluation."""

    name: str

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` problems of a split, unique by `problem_id`, determined by (split, count, seed).

        Raises ValueError when the split has fewer than `count` problems.
        """
        ...

    def size(self, split: Split) -> int | None:
        """How many problems a split has; None where they are made, or cut from a dataset that is not fetched for it.

        Raises ValueError as `problems`.
        """
        ...

    def at_most(self, split: Split) -> int:
        """A number of problems that a split cannot exceed, found without making them; exact where they are data.

        Raises ValueError as `problems`.
        """
        ...

    def remarks(self) -> list[str]:
        """What a user should know of the data that has been read so far, in sentences: rows that were left out."""
        ...

    def example(self) -> Problem:
        """A problem to look at; it needs no data."""
        ...

    def grade(self, problem: Problem, text: str) -> Grade:
        """Grade the text of one completion. Never raises for any text."""
        ...

    def posed(self, question: str, truth: object) -> Problem:
        """The problem of a published generation: its question, and what the file says is right.

        Raises ValueError for a question or a truth that is none of this task.
        """
        ...
