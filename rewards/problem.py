"""The task interface: problems, splits, grades, and the `Task` protocol."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

GradingRules = Literal["fixed", "d1"]
"""Grading rules. `fixed`: ours. `d1`: those of the first d1 including its defects, for comparisons with it."""


class Split(StrEnum):
    """The splits of a task.

    Generated tasks split by solution, datasets by question, so that no two splits share one. If the user gives both
    files, overlap between them is not checked.
    """

    TRAIN = "train"
    """Training problems."""
    VALIDATION = "validation"
    """For model selection, such as the best checkpoint. Empty unless the config sets `validation_fraction`."""
    HELDOUT = "heldout"
    """The test set: reported, and never used for selection."""


class Outcome(StrEnum):
    """How grading ended. Only `GRADED` says something about the completion."""

    GRADED = "graded"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    """`system`, `user` or `assistant`."""
    content: str
    """Its text, without any template."""


def chat(messages: Iterable[Message]) -> list[dict[str, str]]:
    """Return a conversation in the format of chat templates, APIs and files: `role` and `content` of each turn."""
    return [{"role": message.role, "content": message.content} for message in messages]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One item of a task."""

    problem_id: str
    """Unique in its task. Equal problems have equal ids, whatever seed generated them."""
    messages: tuple[Message, ...]
    """The conversation that the policy continues."""
    answer: str
    """The reference answer that the grader compares with (a target, a solved grid, ...)."""
    reference_completion: str
    """A correct completion, the SFT label; grading it gives full reward. Empty if no solution is known."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Further data for the grader, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """The grade of one completion."""

    reward: float
    """The scalar that the policy gradient uses: the sum of `parts`."""
    parts: Mapping[str, float]
    """Reward by part. All graded completions of a task have the same names. `Grader.grade` returns no parts for a
    completion that could not be graded."""
    correct: bool
    """Whether the completion solves the problem, for evaluation."""
    outcome: Outcome = Outcome.GRADED
    """How grading ended."""
    answer: str | None = None
    """The answer extracted from the completion; None if there is none."""
    detail: str = ""
    """Further information for a person: the first failed test, or what timed out."""
    items: tuple[int, int] | None = None
    """(number right, total) if accuracy counts parts of a problem (the empty cells of a Sudoku); None if it counts
    problems."""
    block_rewards: tuple[tuple[int, float], ...] | None = None
    """Rewards of single blocks of the completion, which `reward` includes: tokens up to the block's end, and its
    reward. None if no term rewards blocks."""
    is_zeroed: bool = False
    """Whether it counts as a reward of 0 although it could not be graded (`reward.ungraded: zero`)."""

    @property
    def counts(self) -> bool:
        """Whether its reward takes part in the update. The only place that decides this."""
        return self.outcome is Outcome.GRADED or self.is_zeroed

    @property
    def score(self) -> tuple[int, int]:
        """(number right, total), to be summed into an accuracy."""
        return self.items or (int(self.correct), 1)


class Task(Protocol):
    """A source of problems and the single grader for both reward and evaluation."""

    name: str

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """Return `count` problems of a split, unique by `problem_id`, determined by (split, count, seed).

        Raises ValueError if the split has fewer than `count` problems.
        """
        ...

    def size(self, split: Split) -> int | None:
        """Return the number of problems of a split; None if it is not known without generating or downloading them.

        Raises ValueError as `problems`.
        """
        ...

    def max_size(self, split: Split) -> int:
        """Return an upper bound on the number of problems of a split without generating them; exact for datasets.

        Raises ValueError as `problems`.
        """
        ...

    def warnings(self) -> list[str]:
        """Return warnings for the user about the data read so far, such as how many rows were left out."""
        ...

    def example(self) -> Problem:
        """Return an example problem, which needs no data."""
        ...

    def grade(self, problem: Problem, text: str) -> Grade:
        """Grade the text of one completion. Never raises for any text."""
        ...

    def from_ground_truth(self, question: str, truth: object) -> Problem:
        """Return the problem for a published generation, from its question and the ground truth in its file.

        Raises ValueError if the question or the truth does not fit this task.
        """
        ...
