"""Dynamic sampling rounds: deterministic groups, whatever the order of answers, failures and restarts."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from actors.coordination.pools import WorkUnitFailedError
from actors.coordination.rounds import OpenRounds
from actors.curriculum import outcomes_of
from actors.messages import WeightsId, WorkUnit, WorkUnitKey, WorkUnitSummary
from actors.plan import RunPlan
from actors.run_config import GraderSection
from actors.spec import RunSpec
from actors.training.dynamic_sampling import GroupSelection
from learner.model.tokenizer import ChatTokenizer
from learner.seeds import fold, key_of
from rewards import Grade, SumsConfig


class _Pools:
    """Answers in random order. Six of ten groups are informative, which depends on their problem."""

    running_s = math.inf

    def __init__(self, seed: int, failures: float = 0.0) -> None:
        self._draw, self._failures = random.Random(seed), failures
        self.num_asked = 0

    async def score(
        self, weights_id: WeightsId, key: WorkUnitKey, make: Callable[[], WorkUnit], due: float
    ) -> tuple[Any, WorkUnitSummary]:
        self.num_asked += 1
        work_unit = make()
        assert work_unit.key == key
        for _ in range(self._draw.randrange(12)):
            await asyncio.sleep(0)
        if self._draw.random() < self._failures:
            raise WorkUnitFailedError("a sampler died")
        teaches = [fold(key_of(problem.problem_id)) % 10 < 6 for problem in work_unit.problems]
        size = len(work_unit.requests)
        summary = WorkUnitSummary(
            grades=tuple(Grade(reward=row % 2 * teaches[row], parts={}, correct=False) for row in range(size)),
            texts=("",) * size,
            num_tokens=(1,) * size,
            step_maps=((0,),) * size,
            num_forwards=(1,) * size,
            policy_versions=(weights_id.version,) * size,
            failures=(),
            costs={},
        )
        return work_unit, summary


@pytest.fixture
def dynamic(spec: RunSpec) -> RunSpec:
    """Rounds of 5 groups, out of at most 12 sampled ones."""
    rollout = spec.rollout.model_copy(update={"max_oversampling": 2.4, "max_attempts": 50})
    learner = spec.learner.model_copy(update={"num_rounds": 6})
    return spec.model_copy(update={"rollout": rollout, "learner": learner})


async def _complete(rounds: OpenRounds, index: int) -> list[Any]:
    rounds.begin(index, WeightsId(version=index, digest=""))
    return await rounds.complete(index)


def _trained(spec: RunSpec, pools: _Pools, num_rounds: int, restarts: bool = False) -> list[list[str]]:
    """Return the problems trained on in each round."""
    plan = RunPlan(spec, ChatTokenizer(spec.initial_checkpoint))

    async def run() -> list[list[str]]:
        rounds, trained = OpenRounds(spec, plan, pools, lambda *_: None), []
        for index in range(num_rounds):
            work_units = await _complete(rounds, index)
            if restarts:
                rounds = OpenRounds(spec, plan, pools, lambda *_: None)
                work_units = await _complete(rounds, index)
            summaries = list(rounds.summaries(index).values())
            rows = [
                (work_unit.group_ids, summary.grades) for work_unit, summary in zip(work_units, summaries, strict=True)
            ]
            chosen = GroupSelection.of(spec).trained_rows(rows)
            trained.append(
                [
                    work_unit.problems[row].problem_id
                    for work_unit, kept in zip(work_units, chosen, strict=True)
                    for row in kept
                ]
            )
            graded = (
                (work_unit.problems, summary.grades) for work_unit, summary in zip(work_units, summaries, strict=True)
            )
            plan.record_outcomes(index, outcomes_of(graded))
            rounds.publish(index, WeightsId(version=index + 1, digest=""))
        return trained

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_the_groups_of_a_round_do_not_depend_on_the_order_of_answers(dynamic: RunSpec) -> None:
    num_rounds = dynamic.learner.num_rounds
    first = _trained(dynamic, _Pools(0), num_rounds)
    sizes = [len(asked) // dynamic.learner.group_size for asked in first]
    assert sizes.count(dynamic.learner.groups_per_round) > 3
    for seed in range(1, 6):
        assert _trained(dynamic, _Pools(seed, failures=0.3), num_rounds) == first
        assert _trained(dynamic, _Pools(seed, failures=0.3), num_rounds, restarts=True) == first
        stale = dynamic.model_copy(update={"learner": dynamic.learner.model_copy(update={"max_staleness": 2})})
        assert _trained(stale, _Pools(seed), num_rounds) == first


@pytest.mark.parametrize("staleness", [0, 2])
def test_nor_do_the_groups_under_a_curriculum(dynamic: RunSpec, staleness: int) -> None:
    spec = dynamic.model_copy(
        update={
            "rollout": dynamic.rollout.model_copy(update={"curriculum": 3}),
            "learner": dynamic.learner.model_copy(update={"max_staleness": staleness, "num_rounds": 12}),
        }
    )
    # Enough rounds that problems with known solve rates come again.
    first = _trained(spec, _Pools(0), 12)
    for seed in range(1, 4):
        assert _trained(spec, _Pools(seed, failures=0.3), 12) == first
    if not staleness:
        # With a larger staleness bound, repeated rounds may use other versions, and so have other rewards.
        assert _trained(spec, _Pools(5, failures=0.3), 12, restarts=True) == first


def test_an_unexpected_error_costs_an_attempt_and_is_reported(spec: RunSpec) -> None:
    class Broken(_Pools):
        async def score(self, *_: Any) -> tuple[Any, WorkUnitSummary]:
            raise IndexError("a fault of ours")

    said: list[str] = []
    plan = RunPlan(spec, ChatTokenizer(spec.initial_checkpoint))
    rounds = OpenRounds(spec, plan, Broken(0), lambda what, attempt: said.append(f"{what}, {attempt}"))
    with pytest.raises(RuntimeError, match=r"round 0 has no completions: .* IndexError: a fault of ours"):
        asyncio.run(asyncio.wait_for(_complete(rounds, 0), 60))
    assert said.count("IndexError: a fault of ours, 1") == spec.work_units_per_round


class _Paused(_Pools):
    """Answers nothing until `running_s` has been read as often as it has values."""

    def __init__(self, running_s: list[float]) -> None:
        super().__init__(0)
        self._answers, self._is_over = running_s, asyncio.Event()

    @property
    def running_s(self) -> float:
        if len(self._answers) > 1:
            return self._answers.pop(0)
        self._is_over.set()
        return self._answers[0]

    async def score(self, *asked: Any) -> tuple[Any, WorkUnitSummary]:
        await self._is_over.wait()
        return await super().score(*asked)


def _impatient(spec: RunSpec) -> RunSpec:
    rollout = spec.rollout.model_copy(update={"timeout_s": 0.15})
    return spec.model_copy(update={"rollout": rollout, "grading": GraderSection(timeout_s=0.05)})


def test_the_round_timeout_includes_the_grading_time_of_programs_and_comparisons(
    spec: RunSpec, plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SumsConfig, "max_grading_s", 0.1)
    rounds = OpenRounds(_impatient(spec), plan, _Paused([math.inf]), lambda *_: None)
    with pytest.raises(TimeoutError, match="round 0: no work unit finished for 1 s"):
        asyncio.run(asyncio.wait_for(_complete(rounds, 0), 60))


@pytest.mark.parametrize(("running_s", "is_given_up"), [([0, 0, 0.1], False), ([0, 0.3], True), ([math.inf], True)])
def test_a_round_has_its_full_timeout_again_after_a_pause(
    spec: RunSpec, plan: RunPlan, running_s: list[float], is_given_up: bool
) -> None:
    async def run() -> int:
        rounds = OpenRounds(_impatient(spec), plan, _Paused(running_s), lambda *_: None)
        return len(await _complete(rounds, 0))

    if is_given_up:
        with pytest.raises(TimeoutError, match="round 0: no work unit finished for 0 s"):
            asyncio.run(asyncio.wait_for(run(), 60))
    else:
        assert asyncio.run(asyncio.wait_for(run(), 60)) == spec.work_units_per_round


def test_dynamic_sampling_fills_a_round_if_possible_without_duplicates(dynamic: RunSpec) -> None:
    plan = RunPlan(dynamic, ChatTokenizer(dynamic.initial_checkpoint))
    for index, trained in enumerate(_trained(dynamic, _Pools(0), dynamic.learner.num_rounds)):
        candidates = [
            problem.problem_id
            for place in range(len(plan.work_unit_sizes(index)))
            for problem in plan.round_work_unit(index, place).problems[:: dynamic.learner.group_size]
        ]
        assert len(candidates) == 12
        informative = [name for name in candidates if fold(key_of(name)) % 10 < 6]
        assert list(dict.fromkeys(trained)) == informative[: dynamic.learner.groups_per_round]


def test_a_work_unit_that_fails_for_good_is_replaced(dynamic: RunSpec) -> None:
    rollout = dynamic.rollout.model_copy(update={"max_attempts": 1})
    fragile = dynamic.model_copy(update={"rollout": rollout})
    pools = _Pools(3, failures=0.3)
    sizes = [len(asked) // fragile.learner.group_size for asked in _trained(fragile, pools, 6)]
    assert pools.num_asked > 6 * fragile.work_units_per_round
    assert sizes.count(fragile.learner.groups_per_round) > 1


def test_without_dynamic_sampling_no_group_is_replaced(spec: RunSpec) -> None:
    pools = _Pools(0)
    _trained(spec, pools, 2)
    assert pools.num_asked == 2 * spec.work_units_per_round
