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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from actors.run_log import SOLVE_RATES
from learner.seeds import fold, key_of
from rewards import Grade, Problem

_KEY = 15
_KEY_BITS = 63
# Rounds that can be taken out of the totals without reading the file.
_NUM_KEPT = 64

Outcomes = Mapping[str, tuple[int, int]]
"""Correct completions and graded completions, by problem id."""


class SolveRates:
    """Totals of the outcomes of a run's rounds. Of single rounds only the newest are in memory."""

    def __init__(self, directory: Path | None = None) -> None:
        """Begin with the outcomes in a run's solve rates file; without `directory` there are none.

        Unreadable lines are skipped, and of a repeated round the last line counts. The file is read again if a
        restarted learner goes back further than the rounds in memory.
        """
        self._directory = directory
        self._rounds: dict[int, Outcomes] = {}
        self._totals: dict[str, tuple[int, int]] = {}
        # Rounds that are in the totals, and the first one that can be taken out again.
        self._totals_before, self._first_kept = 0, 0
        self._read(None)

    def record(self, round_index: int, outcomes: Outcomes) -> None:
        """Record a round's outcomes; a repeated round replaces its earlier ones."""
        if round_index < self._first_kept:
            self._read(round_index)
        if round_index < self._totals_before:
            self._count(self._rounds.get(round_index, {}), -1)
            self._count(outcomes, 1)
        self._rounds[round_index] = outcomes

    def before(self, round_index: int) -> Outcomes:
        """Return the totals of the rounds before `round_index`."""
        end = max(0, round_index)
        if end < self._first_kept:
            self._read(end)
        while self._totals_before < end:
            self._count(self._rounds.get(self._totals_before, {}), 1)
            self._totals_before += 1
        while self._totals_before > end:
            self._totals_before -= 1
            self._count(self._rounds.get(self._totals_before, {}), -1)
        for index in range(self._first_kept, end - _NUM_KEPT):
            self._rounds.pop(index, None)
        self._first_kept = max(self._first_kept, end - _NUM_KEPT)
        return {problem: counts for problem, counts in self._totals.items() if counts[1]}

    def _count(self, outcomes: Outcomes, sign: int) -> None:
        for problem, (right, graded) in outcomes.items():
            before = self._totals.get(problem, (0, 0))
            self._totals[problem] = before[0] + sign * right, before[1] + sign * graded

    def _read(self, end: int | None) -> None:
        """Read the file, and keep the outcomes of the rounds since `end`, by default of the newest round."""
        path = None if self._directory is None else self._directory / SOLVE_RATES
        # Two passes: the outcomes of all rounds would take too much memory.
        last = {index: line for line, (index, _) in enumerate(_lines(path))}
        end = max(last, default=-1) + 1 if end is None else end
        # The newest rounds may not be in the file yet.
        newer, self._rounds, self._totals = self._rounds, {}, {}
        self._totals_before = self._first_kept = max(0, end - _NUM_KEPT)
        for line, (index, outcomes) in enumerate(_lines(path)):
            if last[index] == line and index < self._first_kept:
                self._count(outcomes, 1)
            elif last[index] == line:
                self._rounds[index] = outcomes
        self._rounds |= newer


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


def _lines(path: Path | None) -> Iterator[tuple[int, Outcomes]]:
    """Yield round and outcomes of each readable line of a solve rates file; none without a file."""
    if path is None or not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                said = json.loads(line)
                solved = {problem: (int(one[0]), int(one[1])) for problem, one in said["solved"].items()}
                yield int(said["round"]), solved
            except (ValueError, TypeError, KeyError, IndexError, AttributeError):
                continue
