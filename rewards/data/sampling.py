"""Random generation of distinct problems, in an order determined by a seed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from rewards.problem import Problem, Split

_MAX_MISSES = 100_000


def rng_for(key: str) -> Random:
    """Return a generator that is determined by `key` and equal in every process."""
    return Random(key)  # noqa: S311 (problems are no secrets; seeding by str goes through SHA-512, not through `hash`)


def sample_distinct(
    sample: Callable[[Random], Problem | None], *, task: str, split: Split, count: int, seed: int
) -> list[Problem]:
    """Return the first `count` problems with different ids from `sample`, which returns None to reject a sample.

    A smaller count gives a prefix of what a larger one gives. Raises ValueError if 100,000 samples in a row bring
    nothing new: the split is then exhausted, except perhaps for a few very rare problems.
    """
    rng = rng_for(f"{task}/{split}/{seed}")
    problems: dict[str, Problem] = {}
    misses = 0
    while len(problems) < count:
        problem = sample(rng)
        if problem is not None and problem.problem_id not in problems:
            problems[problem.problem_id] = problem
            misses = 0
            continue
        misses += 1
        if misses == _MAX_MISSES:
            raise TooFewProblemsError(task=task, split=split, available=len(problems), count=count)
    return list(problems.values())


class TooFewProblemsError(ValueError):
    """A split has fewer problems than requested; the message says how many it has."""

    def __init__(self, *, task: str, split: Split, available: int, count: int) -> None:
        """Report that only `available` of `count` problems exist."""
        super().__init__(
            f"the {split} split of {task} has {available} problems with this config, but {count} were asked for"
        )
        self.available = available
