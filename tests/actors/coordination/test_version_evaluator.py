"""Evaluation of versions at several schedules, and selection of the best version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from actors.checkpoints.best import Evaluations, validated_best
from actors.coordination.pools import WorkUnitFailedError
from actors.coordination.version_evaluator import VersionEvaluator
from actors.messages import WeightsId, WorkUnit, WorkUnitKey, WorkUnitSummary
from actors.plan import RunPlan
from actors.spec import RunSpec
from learner.model.tokenizer import ChatTokenizer
from rewards import Grade, Outcome
from rollout.schedule_config import ScheduleConfig


def _evaluation(version: int, num_correct: int, label: str = "round") -> dict[str, Any]:
    return {
        "event": "evaluation",
        "label": label,
        "policy_version": version,
        "num_correct": num_correct,
        "num_problems": 10,
    }


def test_the_best_is_the_oldest_of_those_with_the_highest_accuracy() -> None:
    assert Evaluations([_evaluation(3, 4), _evaluation(5, 6), _evaluation(7, 6), _evaluation(9, 5)]).best() == 5


def test_only_evaluations_of_the_rounds_count() -> None:
    others = [_evaluation(0, 9, "untrained"), _evaluation(1, 9, "sft"), _evaluation(12, 9, "control")]
    assert Evaluations(others).best() is None
    assert Evaluations([*others, _evaluation(11, 2, "rl")]).best() == 11


def test_evaluations_after_the_resumed_checkpoint_no_longer_count() -> None:
    again = {"event": "round", "round": 3, "policy_version": 5}
    assert Evaluations([_evaluation(4, 3), _evaluation(6, 9), again, _evaluation(5, 2)]).best() == 4


def test_validation_decides_if_configured_and_includes_the_start_of_the_rounds() -> None:
    heldout = [_evaluation(1, 2, "sft"), _evaluation(9, 10, "rl")]
    assert validated_best(heldout) is None, "the test is nothing to choose by"
    validation = [_evaluation(version, right, "validation") for version, right in ((1, 6), (5, 8), (9, 7))]
    assert validated_best([*heldout, *validation]) == Evaluations([*heldout, *validation]).best() == 5
    assert validated_best([*heldout, validation[0], _evaluation(5, 3, "validation")]) == 1


class _Pools:
    """Fake pools: answers with more than two steps are correct. First tries may fail, and grades may be errors."""

    def __init__(self, num_failing: int = 0, num_ungraded: int = 0, num_tries: int = 99, num_idle: int = 0) -> None:
        """Fail the first try of `num_failing` work units, and every try after the first `num_tries`. The last
        `num_ungraded` answers of a work unit cannot be graded. `num_idle` steps of token editing write nothing."""
        self.asked: list[WorkUnit] = []
        self._num_failing, self._num_ungraded, self._num_tries = num_failing, num_ungraded, num_tries
        self._num_idle = num_idle

    async def score(
        self, weights_id: WeightsId, key: WorkUnitKey, make: Callable[[], WorkUnit], due: float
    ) -> tuple[None, WorkUnitSummary]:
        work_unit = make()
        self.asked.append(work_unit)
        if work_unit.key.index < self._num_failing and self.asked.count(work_unit) == 1:
            raise WorkUnitFailedError("no luck")
        if self.asked.count(work_unit) > self._num_tries:
            raise WorkUnitFailedError("no luck any more")
        count, steps = len(work_unit.requests), work_unit.requests[0].params.num_denoise_steps
        grades = [Grade(reward=0.0, parts={}, correct=steps > 2) for _ in range(count)]
        failures = tuple(f"the grader failed on {index}" for index in range(self._num_ungraded))
        for index, what in enumerate(failures):
            grades[-1 - index] = Grade(reward=0.0, parts={}, correct=False, outcome=Outcome.ERROR, detail=what)
        step_maps = tuple(tuple(range(steps)) for _ in range(count))
        return None, WorkUnitSummary(
            grades=tuple(grades),
            texts=(),
            num_tokens=(),
            step_maps=step_maps,
            num_forwards=(steps + self._num_idle,) * count,
            policy_versions=(),
            failures=failures,
            costs={},
        )


def _scored(
    spec: RunSpec, plan: RunPlan, pools: _Pools, label: str, on_failure: Callable[..., None] = lambda *_: None
) -> dict[str, Any]:
    steps = [ScheduleConfig(num_denoise_steps=count) for count in (4, 1, 8)]
    spec = spec.model_copy(
        update={
            "evaluation": spec.evaluation.model_copy(update={"schedules": steps}),
            "rollout": spec.rollout.model_copy(update={"max_attempts": 2}),
        }
    )
    evaluation = VersionEvaluator(spec, plan, pools, on_failure)  # type: ignore[arg-type]
    return asyncio.run(evaluation.score(WeightsId(version=1, digest=""), label, due=0))


def test_denoise_steps_that_write_nothing_count(spec: RunSpec, plan: RunPlan) -> None:
    assert _scored(spec, plan, _Pools(num_idle=1), "rl")["mean_steps"] == 5


@pytest.mark.parametrize("num_failing", [0, 3])
def test_every_problem_is_evaluated_once_per_schedule_and_the_first_schedule_counts(
    spec: RunSpec, plan: RunPlan, num_failing: int
) -> None:
    pools = _Pools(num_failing)
    scored = _scored(spec, plan, pools, "rl")
    assert (scored["schedule"], scored["num_correct"], scored["num_problems"]) == ("4 steps", 20, 20)
    right = {name: (counts["num_correct"], counts["mean_steps"]) for name, counts in scored["schedules"].items()}
    assert right == {"4 steps": (20, 4), "1 step": (0, 1), "8 steps": (20, 8)}
    assert len(pools.asked) == 9 + num_failing
    assert len({work_unit.key for work_unit in pools.asked}) == 9, "each has a name of its own"


@pytest.mark.parametrize("num_tries", [1, 2])
def test_a_completion_that_no_attempt_can_grade_counts_as_wrong_and_is_reported(
    spec: RunSpec, plan: RunPlan, num_tries: int
) -> None:
    pools, said = _Pools(num_ungraded=2, num_tries=num_tries), []
    scored = _scored(spec, plan, pools, "round", lambda what, attempt: said.append((attempt, what)))
    assert (scored["num_problems"], scored["num_ungraded"], scored["num_correct"]) == (20, 6, 14)
    assert len(pools.asked) == 6, "each work unit is tried as often as one that fails"
    first, other = "the grader failed on 0", "the grader failed on 1"
    second = first if num_tries == 2 else "no luck any more"
    assert sorted(said) == sorted([(1, first), (2, second), (2, other)] * 3)


def test_no_accuracy_is_reported_over_fewer_problems(spec: RunSpec, plan: RunPlan) -> None:
    with pytest.raises(RuntimeError, match="the evaluation failed 2 times: no luck any more"):
        _scored(spec, plan, _Pools(num_tries=0), "round")


def test_within_a_stage_only_the_first_schedule_is_evaluated(spec: RunSpec, plan: RunPlan) -> None:
    pools = _Pools()
    scored = _scored(spec, plan, pools, "round")
    assert list(scored["schedules"]) == ["4 steps"]
    assert len(pools.asked) == 3


def test_validation_uses_its_own_problems_at_the_first_schedule(spec: RunSpec) -> None:
    task = spec.task.model_copy(update={"validation_fraction": 0.3})
    evaluation = spec.evaluation.model_copy(update={"num_validation": 10})
    spec = spec.model_copy(update={"task": task, "evaluation": evaluation})
    plan, asked = RunPlan(spec, ChatTokenizer(spec.initial_checkpoint)), []
    for label, count in (("validation", 10), ("sft", 20)):
        pools = _Pools()
        scored = _scored(spec, plan, pools, label)
        assert (scored["num_problems"], len(scored["schedules"])) == (count, 1 if label == "validation" else 3)
        asked.append({problem.problem_id for work_unit in pools.asked for problem in work_unit.problems})
    trained_on = {problem.problem_id for problem in plan.train}
    assert asked[0].isdisjoint(asked[1] | trained_on)
    assert trained_on.isdisjoint(asked[1])
