"""Drawing problems that are all different, in an order that a seed determines."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from rewards.problem import Problem, Split

_MAX_MISSES = 100_000


def rng_for(key: str) -> Random:
    """A generator that is determined by `key`, equal in every process."""
    return Random(key)  # noqa: S311 (problems are no secrets; seeding by str goes through SHA-512, not through `hash`)


def draw_distinct(
    draw: Callable[[Random], Problem | None], *, task: str, split: Split, count: int, seed: int
) -> list[Problem]:
    """The first `count` problems with different ids that `draw` gives; None from it is a rejected draw.

    A smaller count gives a prefix of what a larger one gives. Raises ValueError when 100,000 draws in a row bring
    nothing new: the split is then exhausted, but perhaps for a few problems that are very rare.
    """
    rng = rng_for(f"{task}/{split}/{seed}")
    problems: dict[str, Problem] = {}
    misses = 0
    while len(problems) < count:
        problem = draw(rng)
        if problem is not None and problem.problem_id not in problems:
            problems[problem.problem_id] = problem
            misses = 0
            continue
        misses += 1
        if misses == _MAX_MISSES:
            raise TooFewProblemsError(task=task, split=split, available=len(problems), count=count)
    return list(problems.values())


class TooFewProblemsError(ValueError):
    """A split has fewer problems than were asked for; in one sentence, how many it has."""

    def __init__(self, *, task: str, split: Split, available: int, count: int) -> None:
        """`available` of `count` problems are there."""
        super().__init__(
            f"the {split} split of {task} has {available} problems with this config, but {count} were asked for"
        )
        self.available = available
