"""The curriculum: how often each problem was solved so far, and which problems a round takes because of it.

A group whose completions are all right, or all wrong, teaches nothing. If a completion is right with probability p,
rewards vary within the group as p (1 - p) does, so that is what a problem is worth; p is estimated from all that was
sampled of the problem, by the mean of a Beta(1, 1) prior's posterior. One that was never asked is worth most.

Candidates are drawn without replacement in proportion to what they are worth (Efraimidis and Spirakis 2006: the largest
of u^(1/w)). The draw of a round depends on the seed and on the rewards of the rounds that are certain to be known, so
not on who was faster; with `learner.max_staleness` 0 it is the same in every run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from actors.run_log import SOLVE_RATES
from learner.keys import fold, key_of
from rewards import Grade, Problem

_KEY = 15
_KEY_BITS = 63

Outcomes = Mapping[str, tuple[int, int]]
"""By problem: right completions, and graded ones."""


class SolveRates:
    """What became of the problems of each round."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._rounds: dict[int, Outcomes] = {}
        self._totals: dict[str, tuple[int, int]] = {}
        self._totals_before = 0

    def note(self, round_index: int, outcomes: Outcomes) -> None:
        """A round was graded; one that is done again has what it had."""
        if self._rounds.get(round_index) == outcomes:
            return
        self._rounds[round_index] = outcomes
        if round_index < self._totals_before:
            self._totals, self._totals_before = {}, 0

    def before(self, round_index: int) -> Outcomes:
        """Totals of the rounds before one."""
        if round_index < self._totals_before:
            self._totals, self._totals_before = {}, 0
        for index in range(self._totals_before, round_index):
            for problem, (right, graded) in self._rounds.get(index, {}).items():
                before = self._totals.get(problem, (0, 0))
                self._totals[problem] = before[0] + right, before[1] + graded
        self._totals_before = max(self._totals_before, round_index)
        return self._totals


def chosen(
    candidates: Sequence[tuple[Problem, int]], count: int, known: Outcomes, seed: int, round_index: int
) -> list[tuple[Problem, int]]:
    """The `count` problems of a round, each with its epoch, among its candidates.

    Args:
        candidates: problems with their epochs, in their order.
        count: how many.
        known: what became of them in earlier rounds.
        seed: the run's.
        round_index: the round.
    """

    def priority(candidate: tuple[Problem, int]) -> float:
        problem, epoch = candidate
        draw = fold(seed, _KEY, round_index, key_of(problem.problem_id), epoch)
        return math.log((draw + 0.5) / 2**_KEY_BITS) / _worth(*known.get(problem.problem_id, (0, 0)))

    return sorted(candidates, key=priority, reverse=True)[:count]


def _worth(right: int, graded: int) -> float:
    rate = (right + 1) / (graded + 2)
    return rate * (1 - rate)


def outcomes_of(graded: Iterable[tuple[Sequence[Problem], Sequence[Grade]]]) -> Outcomes:
    """What became of the problems of some portions, by the problem and the grade of each of their rows."""
    found: dict[str, tuple[int, int]] = {}
    for problems, grades in graded:
        for problem, grade in zip(problems, grades, strict=True):
            if grade.counts:
                right, all_graded = found.get(problem.problem_id, (0, 0))
                found[problem.problem_id] = right + grade.correct, all_graded + 1
    return found


def line_of(round_index: int, outcomes: Outcomes) -> str:
    """What the file has of a round."""
    return json.dumps({"round": round_index, "solved": outcomes}, ensure_ascii=False)


def read_solve_rates(directory: Path) -> SolveRates:
    """What a run's file says; a line that cannot be read is none. Of a round that was done twice the last counts."""
    rates = SolveRates()
    for round_index, outcomes in _lines(directory / SOLVE_RATES):
        rates.note(round_index, outcomes)
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
