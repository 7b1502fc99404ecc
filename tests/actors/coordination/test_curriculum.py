"""Curriculum: solve rates of problems, and the sampling of problems that follows from them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.curriculum import SolveRates, choose_problems, line_of, outcomes_of
from actors.messages import WorkUnit, WorkUnitKey
from actors.plan import RunPlan
from actors.run_log import SOLVE_RATES, RunLog
from actors.spec import RunSpec
from learner.model.tokenizer import ChatTokenizer
from rewards import Grade, Outcome, Problem

TIMES, STALENESS = 3, 2


def _plan(spec: RunSpec, times: int = TIMES, staleness: int = 0, oversampling: float = 1.0) -> RunPlan:
    rollout = spec.rollout.model_copy(update={"curriculum": times, "max_oversampling": oversampling})
    learner = spec.learner.model_copy(update={"max_staleness": staleness})
    changed = spec.model_copy(update={"rollout": rollout, "learner": learner})
    return RunPlan(changed, ChatTokenizer(spec.initial_checkpoint))


def _problem_ids(plan: RunPlan, round_index: int) -> list[str]:
    """Return the problem of each group of a round, in order."""
    work_units = [plan.round_work_unit(round_index, index) for index in range(len(plan.work_unit_sizes(round_index)))]
    return list(dict.fromkeys(problem.problem_id for work_unit in work_units for problem in work_unit.problems))


def _problems(count: int) -> list[tuple[Problem, int]]:
    return [
        (Problem(problem_id=f"problem {index}", messages=(), answer="", reference_completion=""), 0)
        for index in range(count)
    ]


def test_totals_are_of_the_rounds_before() -> None:
    rates = SolveRates()
    rates.record(0, {"a": (1, 4), "b": (0, 4)})
    rates.record(1, {"a": (3, 4)})
    assert dict(rates.before(0)) == {}
    assert dict(rates.before(1)) == {"a": (1, 4), "b": (0, 4)}
    assert dict(rates.before(5)) == {"a": (4, 8), "b": (0, 4)}
    # A restarted learner repeats a round, perhaps with other versions: the new outcomes replace the old.
    rates.record(0, {"a": (2, 4)})
    assert dict(rates.before(2)) == {"a": (5, 8)}
    assert dict(rates.before(-1)) == {}


def test_problems_are_drawn_by_priority_and_unknown_ones_first() -> None:
    candidates = _problems(4)
    # Never solved, always solved, solved half of the time, never sampled: weights 1/12 x 11/12 twice, 1/4 and 1/4.
    known = {"problem 0": (0, 10), "problem 1": (10, 10), "problem 2": (5, 10)}
    first = Counter(choose_problems(candidates, 1, known, 7, index)[0][0].problem_id for index in range(4000))
    hard = (1 / 12) * (11 / 12)
    for name, worth in (("problem 0", hard), ("problem 1", hard), ("problem 2", 0.25), ("problem 3", 0.25)):
        assert first[name] / 4000 == pytest.approx(worth / (2 * hard + 0.5), abs=0.03)
    assert choose_problems(candidates, 2, known, 7, 3) == choose_problems(candidates, 2, known, 7, 3)
    assert len({problem.problem_id for problem, _ in choose_problems(candidates, 4, known, 7, 3)}) == 4


@given(st.integers(0, 2**62), st.integers(0, 10**6))
def test_every_draw_has_a_priority(seed: int, round_index: int) -> None:
    assert len(choose_problems(_problems(3), 3, {"problem 0": (0, 10**9)}, seed, round_index)) == 3


def test_without_a_curriculum_problems_come_in_their_order(spec: RunSpec, plan: RunPlan) -> None:
    off = _plan(spec, times=1)
    off.record_outcomes(0, dict.fromkeys(_problem_ids(off, 0), (4, 4)))
    assert [_problem_ids(off, index) for index in range(4)] == [_problem_ids(plan, index) for index in range(4)]


def test_a_round_takes_the_candidates_of_highest_priority(spec: RunSpec) -> None:
    plan, off = _plan(spec), _plan(spec, times=1)
    size = len(_problem_ids(plan, 0))
    for index in range(3):
        places = range(index * TIMES, (index + 1) * TIMES)
        candidates = [problem for place in places for problem in _problem_ids(off, place)]
        asked = _problem_ids(plan, index)
        assert len(asked) == size
        assert set(asked) <= set(candidates)
        # Problems that were always solved must yield to those never sampled.
        plan.record_outcomes(index, dict.fromkeys(asked, (10**6, 10**6)))


def test_outcomes_that_may_not_be_known_yet_change_nothing(spec: RunSpec) -> None:
    """Round r may begin once round r - S - 1 is published, so that later outcomes must not count for it."""
    plan, ahead = _plan(spec, staleness=STALENESS), _plan(spec, staleness=STALENESS)
    for index in range(6):
        solved = dict.fromkeys(_problem_ids(plan, index), (index % 3, 2))
        plan.record_outcomes(index, solved)
    for index in range(6):
        # This plan samples each round at the earliest moment that is allowed.
        assert _problem_ids(ahead, index + STALENESS) == _problem_ids(plan, index + STALENESS)
        ahead.record_outcomes(index, dict.fromkeys(_problem_ids(ahead, index), (index % 3, 2)))


def test_a_round_has_candidates_for_the_groups_that_it_may_replace(spec: RunSpec) -> None:
    plan, off = _plan(spec, oversampling=2.0), _plan(spec, times=1, oversampling=2.0)
    assert len(_problem_ids(plan, 0)) == len(_problem_ids(off, 0)) == 2 * len(_problem_ids(_plan(spec), 0))


def test_the_file_of_solve_rates_restores_what_was_known(spec: RunSpec, tmp_path: Path) -> None:
    plan, log = _plan(spec), RunLog(tmp_path)
    for index in range(4):
        solved = dict.fromkeys(_problem_ids(plan, index), (index % 2, 2))
        plan.record_outcomes(index, solved)
        log.add_solve_rates(line_of(index, solved))
    log.close()
    with (tmp_path / SOLVE_RATES).open("a") as file:
        file.write('{"round": 9, "solved": {"x": 1}}\nnot a line\n{"round": 4, "sol')
    again = _plan(spec)
    again.solve_rates = SolveRates(tmp_path)
    assert [_problem_ids(again, index) for index in range(5)] == [_problem_ids(plan, index) for index in range(5)]
    assert dict(SolveRates(tmp_path / "nowhere").before(9)) == {}


def test_ungraded_completions_do_not_count(spec: RunSpec) -> None:
    def graded(correct: bool, outcome: Outcome = Outcome.GRADED) -> Grade:
        return Grade(reward=0.0, parts={}, correct=correct, outcome=outcome)

    work_unit: WorkUnit = _plan(spec).round_work_unit(0, 0)
    (first, *_), size = work_unit.problems, spec.learner.group_size
    grades = [graded(index % 2 == 0) for index in range(len(work_unit.problems))]
    grades[0] = graded(False, Outcome.ERROR)
    assert outcomes_of([(work_unit.problems, grades)])[first.problem_id] == (-(-size // 2) - 1, size - 1)
    assert _plan(spec).work_unit_problems(WorkUnitKey(round=0, index=0)) == list(work_unit.problems)


def test_a_curriculum_below_one_is_refused(spec: RunSpec) -> None:
    values: dict[str, Any] = spec.rollout.model_dump() | {"curriculum": 0}
    with pytest.raises(ValueError, match="curriculum"):
        type(spec.rollout).model_validate(values)


class _SlowSolveRates:
    """Outcomes of all rounds; totals are summed anew each time."""

    def __init__(self) -> None:
        self._rounds: dict[int, dict[str, tuple[int, int]]] = {}

    def record(self, round_index: int, outcomes: dict[str, tuple[int, int]]) -> None:
        self._rounds[round_index] = outcomes

    def before(self, round_index: int) -> dict[str, tuple[int, int]]:
        totals: dict[str, tuple[int, int]] = {}
        for index, outcomes in self._rounds.items():
            for problem, (right, graded) in outcomes.items() if index < round_index else ():
                known = totals.get(problem, (0, 0))
                totals[problem] = known[0] + right, known[1] + graded
        return totals


@pytest.mark.parametrize("back", [3, 90, 250])
def test_totals_are_exact_after_a_learner_went_back(tmp_path: Path, back: int) -> None:
    rates, slow, log = SolveRates(tmp_path), _SlowSolveRates(), RunLog(tmp_path)
    order = [*range(300), *range(300 - back, 320), *range(250, 330)]
    for number, index in enumerate(order):
        assert rates.before(index - STALENESS) == slow.before(index - STALENESS)
        outcomes = {f"problem {index % 7}": (number % 3, 2), f"problem {number % 11 + 7}": (number % 2, 2)}
        log.add_solve_rates(line_of(index, outcomes))
        # The newest rounds need not be in the file yet.
        if number % 5 == 0:
            log.write_out()
        rates.record(index, outcomes)
        slow.record(index, outcomes)
        assert len(rates._rounds) < 150 + back
    log.close()
    assert SolveRates(tmp_path).before(330) == slow.before(330)
    assert len(SolveRates(tmp_path)._rounds) <= 64


def test_the_order_of_the_problems_is_kept_for_few_epochs(spec: RunSpec) -> None:
    plan, again = _plan(spec), _plan(spec)
    num_rounds = 40 * len(plan.train) // spec.learner.groups_per_round
    seen = [_problem_ids(plan, index) for index in range(num_rounds)]
    assert len(plan._order._orders) < 20
    assert [_problem_ids(plan, index) for index in (0, 1)] == seen[:2]
    assert _problem_ids(again, num_rounds - 1) == seen[-1]
