"""Curriculum: sampling of a round's problems by their solve rates so far.

A group whose completions are all correct, or all wrong, gives no learning signal. If a completion is correct with
probability p, rewards within a group vary as p (1 - p), so that is a problem's weight. p is the posterior mean under a
Beta(1, 1) prior, given all graded completions of the problem. A problem that was never sampled has the largest weight.

Candidates are sampled without replacement in proportion to their weights (Efraimidis and Spirakis 2006: the largest of
u^(1/w)). The choice depends on the seed and on the rewards of those rounds that are certain to be known, so it does not
depend on timing. With `learner.max_staleness` 0 it is the same in every run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from actors.run_log import SOLVE_RATES
from learner.seeds import fold, key_of
from rewards import Grade, Problem

_KEY = 15
_KEY_BITS = 63

Outcomes = Mapping[str, tuple[int, int]]
"""Correct completions and graded completions, by problem id."""


class SolveRates:
    """Outcomes of each round's problems, and their running totals."""

    def __init__(self) -> None:
        """Start without any outcomes."""
        self._rounds: dict[int, Outcomes] = {}
        self._totals: dict[str, tuple[int, int]] = {}
        self._totals_before = 0

    def record(self, round_index: int, outcomes: Outcomes) -> None:
        """Record a round's outcomes; a repeated round replaces its earlier ones."""
        if self._rounds.get(round_index) == outcomes:
            return
        self._rounds[round_index] = outcomes
        if round_index < self._totals_before:
            self._totals, self._totals_before = {}, 0

    def before(self, round_index: int) -> Outcomes:
        """Return the totals of the rounds before `round_index`."""
        if round_index < self._totals_before:
            self._totals, self._totals_before = {}, 0
        for index in range(self._totals_before, round_index):
            for problem, (right, graded) in self._rounds.get(index, {}).items():
                before = self._totals.get(problem, (0, 0))
                self._totals[problem] = before[0] + right, before[1] + graded
        self._totals_before = max(self._totals_before, round_index)
        return self._totals


def choose_problems(
    candidates: Sequence[tuple[Problem, int]], count: int, known: Outcomes, seed: int, round_index: int
) -> list[tuple[Problem, int]]:
    """Choose the `count` problems of a round, each with its epoch, from its candidates.

    Args:
        candidates: problems with their epochs, in order.
        count: number of problems to choose.
        known: outcomes of earlier rounds.
        seed: the run's seed.
        round_index: the round.
    """

    def priority(candidate: tuple[Problem, int]) -> float:
        problem, epoch = candidate
        draw = fold(seed, _KEY, round_index, key_of(problem.problem_id), epoch)
        return math.log((draw + 0.5) / 2**_KEY_BITS) / _weight(*known.get(problem.problem_id, (0, 0)))

    return sorted(candidates, key=priority, reverse=True)[:count]


def _weight(right: int, graded: int) -> float:
    rate = (right + 1) / (graded + 2)
    return rate * (1 - rate)


def outcomes_of(graded: Iterable[tuple[Sequence[Problem], Sequence[Grade]]]) -> Outcomes:
    """Count correct and graded completions by problem, given the problem and grade of each row of some work units."""
    found: dict[str, tuple[int, int]] = {}
    for problems, grades in graded:
        for problem, grade in zip(problems, grades, strict=True):
            if grade.counts:
                right, all_graded = found.get(problem.problem_id, (0, 0))
                found[problem.problem_id] = right + grade.correct, all_graded + 1
    return found


def line_of(round_index: int, outcomes: Outcomes) -> str:
    """Encode a round's outcomes as one line of the solve rates file."""
    return json.dumps({"round": round_index, "solved": outcomes}, ensure_ascii=False)


def read_solve_rates(directory: Path) -> SolveRates:
    """Read a run's solve rates file, skipping unreadable lines. Of a repeated round, the last line counts."""
    rates = SolveRates()
    for round_index, outcomes in _lines(directory / SOLVE_RATES):
        rates.record(round_index, outcomes)
    return rates


def _lines(path: Path) -> Iterable[tuple[int, Outcomes]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError:
        return
    for line in lines:
        try:
            said = json.loads(line)
            yield int(said["round"]), {problem: (int(one[0]), int(one[1])) for problem, one in said["solved"].items()}
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            continue
