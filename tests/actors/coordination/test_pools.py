"""Pools of samplers and graders, without Ray: assignment, backpressure, retries and scaling."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from actors.coordination.pools import Pools, WorkUnitFailedError
from actors.coordination.reporting.timeline import WorkSpan
from actors.messages import EVALUATION_ROUND, WeightsId, WorkUnit, WorkUnitKey
from rewards import RewardUnavailableError


class _Method:
    """A fake actor method with two returns: a reference, and a value that the test sets."""

    def __init__(self, is_instant: bool) -> None:
        self._is_instant = is_instant
        self.answers: list[asyncio.Future[Any]] = []

    def options(self, num_returns: int) -> _Method:
        assert num_returns == 2
        return self

    def remote(self, *arguments: Any) -> tuple[str, asyncio.Future[Any]]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.answers.append(answer)
        if self._is_instant:
            answer.set_result(None)
        return "reference", answer


class _Ready:
    """A fake `ready`: answers while the actor is up, and otherwise once it is up again."""

    def __init__(self) -> None:
        self.is_up = asyncio.Event()
        self.is_up.set()

    def options(self, concurrency_group: str) -> _Ready:
        assert concurrency_group == "liveness"
        return self

    async def remote(self) -> bool:
        return await self.is_up.wait()


class _Judged:
    """A grader whose judge fails for its first calls."""

    def __init__(self, num_failures: int) -> None:
        self.grade, self.num_calls, self._num_failures = self, 0, num_failures
        self.ready = _Ready()

    def options(self, num_returns: int) -> _Judged:
        return self

    def remote(self, *arguments: Any) -> tuple[str, asyncio.Future[Any]]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.num_calls += 1
        if self.num_calls <= self._num_failures:
            cause = RewardUnavailableError("the judge is away")
            answer.set_exception(RayTaskError("grade", "traceback", cause).as_instanceof_cause())
        else:
            answer.set_result("graded")
        return "reference", answer


class _Actor:
    def __init__(self, is_instant: bool) -> None:
        self.generate = self.grade = _Method(is_instant)
        self.ready = _Ready()


def _named(kind: str, actors: Sequence[Any]) -> dict[str, Any]:
    return {f"{kind} {index}": actor for index, actor in enumerate(actors)}


def _work_units(count: int) -> list[WorkUnit]:
    return [
        WorkUnit(key=WorkUnitKey(round=0, index=index), problems=(), group_ids=(), requests=())
        for index in range(count)
    ]


def _score(pools: Pools, work_unit: WorkUnit) -> Coroutine[Any, Any, tuple[Any, Any]]:
    return pools.score(WeightsId(version=0, digest=""), work_unit.key, lambda: work_unit, work_unit.key.round)


def test_an_unavailable_reward_pauses_the_run_and_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.coordination.pools._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("actors.coordination.pools._LONGEST_PAUSE_S", 0.02)

    async def scores() -> None:
        sampler, grader, told = _Actor(is_instant=True), _Judged(num_failures=12), []
        pools = Pools(
            {"sampler 0": sampler},
            {"grader 0": grader},
            sampling_timeout_s=10,
            grading_timeout_s=10,
            on_pause=told.append,
        )
        tasks = [asyncio.create_task(_score(pools, work_unit)) for work_unit in _work_units(3)]
        while not told:
            await asyncio.sleep(0)
        assert pools.running_s == 0
        assert [(await task)[1] for task in tasks] == ["graded"] * 3
        assert 0 < pools.running_s < 10
        assert told == ["the judge is away", None]
        # The samples are kept, and the grader stays in the pool.
        assert len(sampler.generate.answers) == 3
        assert grader.num_calls == 12 + 3

    asyncio.run(asyncio.wait_for(scores(), 10))


def test_a_slow_grader_does_not_block_the_samplers() -> None:
    async def scores() -> None:
        sampler, grader = _Actor(is_instant=True), _Actor(is_instant=False)
        pools = Pools(
            {"sampler 0": sampler}, {"grader 0": grader}, sampling_timeout_s=10, grading_timeout_s=10, on_pause=print
        )
        tasks = [asyncio.create_task(_score(pools, work_unit)) for work_unit in _work_units(5)]
        for _ in range(100):
            await asyncio.sleep(0)
        # The only grader is blocked on the first work unit, and all five are sampled.
        assert len(sampler.generate.answers) == 5
        assert len(grader.grade.answers) == 1
        while not all(task.done() for task in tasks):
            for answer in grader.grade.answers:
                if not answer.done():
                    answer.set_result("graded")
            await asyncio.sleep(0)
        assert [task.result()[1] for task in tasks] == ["graded"] * 5

    asyncio.run(asyncio.wait_for(scores(), 10))


def test_use_is_the_utilization_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("actors.coordination.pool.time.monotonic", lambda: clock[0])

    async def scores() -> None:
        samplers = [_Actor(is_instant=False), _Actor(is_instant=False)]
        grader = _Actor(is_instant=True)
        pools = Pools(
            _named("sampler", samplers),
            {"grader 0": grader},
            sampling_timeout_s=10,
            grading_timeout_s=10,
            on_pause=print,
        )
        task = asyncio.create_task(_score(pools, _work_units(1)[0]))
        await asyncio.sleep(0)
        clock[0] += 3
        samplers[0].generate.answers[0].set_result(1)
        await task
        clock[0] += 3
        # One of two samplers was busy for three of six seconds.
        assert pools.use()["samplers"] == {"size": 2, "away": 0, "busy": 0.25}
        clock[0] += 6
        assert pools.use()["samplers"] == {"size": 2, "away": 0, "busy": 0.0}

    asyncio.run(asyncio.wait_for(scores(), 10))


def test_an_actor_that_died_is_unreachable_until_it_answers() -> None:
    async def scores() -> None:
        sampler, grader = _Actor(is_instant=False), _Actor(is_instant=True)
        pools = Pools(
            {"sampler 0": sampler}, {"grader 0": grader}, sampling_timeout_s=10, grading_timeout_s=10, on_pause=print
        )
        task = asyncio.create_task(_score(pools, _work_units(1)[0]))
        await asyncio.sleep(0)
        sampler.ready.is_up.clear()
        sampler.generate.answers[0].set_exception(ActorDiedError())
        with pytest.raises(WorkUnitFailedError, match="a sampler failed"):
            await task
        await asyncio.sleep(0)
        assert pools.use()["samplers"]["away"] == 1
        sampler.ready.is_up.set()
        while pools.use()["samplers"]["away"]:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scores(), 10))


def test_an_actor_that_died_while_free_costs_no_attempt() -> None:
    async def scores() -> None:
        dead, alive, grader = _Actor(is_instant=True), _Actor(is_instant=True), _Actor(is_instant=True)
        asked = []

        class Dead(_Ready):
            async def remote(self) -> bool:
                asked.append("dead")
                if len(asked) == 1:
                    raise ActorDiedError
                return await super().remote()

        dead.ready = Dead()
        dead.ready.is_up.clear()
        pools = Pools(
            _named("sampler", [dead, alive]),
            {"grader 0": grader},
            sampling_timeout_s=10,
            grading_timeout_s=10,
            on_pause=print,
        )
        await _score(pools, _work_units(1)[0])
        assert len(alive.generate.answers) == 1
        assert dead.generate.answers == []
        assert pools.use()["samplers"]["away"] == 1

    asyncio.run(asyncio.wait_for(scores(), 10))


def test_a_timeout_error_raised_by_an_actor_does_not_kill_it(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr("actors.coordination.pools.ray.kill", lambda actor, **_: killed.append(actor))

    async def scores() -> None:
        sampler, grader = _Actor(is_instant=False), _Actor(is_instant=True)
        pools = Pools(
            {"sampler 0": sampler}, {"grader 0": grader}, sampling_timeout_s=10, grading_timeout_s=10, on_pause=print
        )
        task = asyncio.create_task(_score(pools, _work_units(1)[0]))
        while not sampler.generate.answers:
            await asyncio.sleep(0)
        cause = TimeoutError("policy version 3 did not arrive within 120 s")
        sampler.generate.answers[0].set_exception(
            RayTaskError("generate", f"traceback\nTimeoutError: {cause}", cause).as_instanceof_cause()
        )
        with pytest.raises(WorkUnitFailedError, match="did not arrive within 120 s"):
            await task
        assert killed == []

    asyncio.run(asyncio.wait_for(scores(), 10))


def test_time_spans_of_work_and_outages_are_returned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("actors.coordination.pool.time.monotonic", lambda: clock[0])

    async def scores() -> None:
        sampler, grader = _Actor(is_instant=False), _Actor(is_instant=True)
        pools = Pools(
            {"sampler 0": sampler}, {"grader 0": grader}, sampling_timeout_s=10, grading_timeout_s=10, on_pause=print
        )
        (work_unit,) = _work_units(1)
        task = asyncio.create_task(_score(pools, work_unit))
        while not sampler.generate.answers:
            await asyncio.sleep(0)
        clock[0] += 3
        sampler.ready.is_up.clear()
        sampler.generate.answers[0].set_exception(ActorDiedError())
        with pytest.raises(WorkUnitFailedError, match="a sampler failed"):
            await task
        await asyncio.sleep(0)
        clock[0] += 4
        assert pools.unreachable() == {"sampler 0": 4.0}
        sampler.ready.is_up.set()
        while pools.unreachable():
            await asyncio.sleep(0)
        assert pools.take_spans() == [
            WorkSpan(actor="sampler 0", key=work_unit.key, began=100.0, ended=103.0, is_done=False),
            WorkSpan(actor="sampler 0", key=None, began=103.0, ended=107.0, is_done=False),
        ]
        assert pools.take_spans() == []

    asyncio.run(asyncio.wait_for(scores(), 10))


class _Sleeper(_Actor):
    """A sampler that counts how often it is offloaded, or hangs while offloading until it is killed."""

    def __init__(self, *, hangs: bool = False) -> None:
        super().__init__(is_instant=True)
        self.offload = self
        self.hangs, self.num_sleeps = hangs, 0

    async def remote(self) -> None:
        while self.hangs:
            await asyncio.sleep(0.01)
        self.num_sleeps += 1

    def kill(self, *, no_restart: bool) -> None:
        assert not no_restart
        self.hangs = False


def test_a_turn_ends_when_all_samplers_are_offloaded_and_a_hung_one_is_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.coordination.pool.ray.kill", lambda actor, **how: actor.kill(**how))
    monkeypatch.setattr("actors.coordination.pool._RELEASE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("actors.coordination.pool.RESTART_POLL_S", 0.01)

    async def turns() -> None:
        samplers = [_Sleeper(), _Sleeper(hangs=True)]
        pools = Pools(_named("sampler", samplers), {}, sampling_timeout_s=10, grading_timeout_s=10, on_pause=print)
        assert await pools.end_turn() == ["sampler 1 did not free its GPU at the end of its turn and was restarted"]
        assert [sampler.num_sleeps for sampler in samplers] == [1, 1]
        assert await pools.end_turn() == []
        samplers[0].ready.is_up.clear()
        monkeypatch.setattr("actors.coordination.pool.START_S", 0.5)
        with pytest.raises(TimeoutError, match="sampler 0 did not restart within 0 s, and may hold its GPU"):
            await pools.end_turn()

    asyncio.run(asyncio.wait_for(turns(), 60))


def test_work_that_the_learner_waits_for_is_served_first() -> None:
    async def scores() -> None:
        sampler, grader = _Actor(is_instant=False), _Actor(is_instant=True)
        pools = Pools(
            {"sampler 0": sampler}, {"grader 0": grader}, sampling_timeout_s=10, grading_timeout_s=10, on_pause=print
        )
        keys = [(4, 0), (5, 1), (5, 0), (4, 7), (EVALUATION_ROUND, 3)]
        tasks, given_up = [], (5, 1)
        for round_index, index in keys:
            key = WorkUnitKey(round=round_index, index=index)
            work_unit = WorkUnit(key=key, problems=(), group_ids=(), requests=())
            tasks.append(asyncio.create_task(_score(pools, work_unit)))
            await asyncio.sleep(0)
        tasks[keys.index(given_up)].cancel()
        served = []
        for _ in range(4):
            for _ in range(10):
                await asyncio.sleep(0)
            (work,) = pools.assignments()
            served.append((work.key.round, work.key.index))
            sampler.generate.answers[-1].set_result(1)
        assert served == [(4, 0), (EVALUATION_ROUND, 3), (4, 7), (5, 0)]
        await asyncio.gather(*tasks, return_exceptions=True)
        assert pools.assignments() == []

    asyncio.run(asyncio.wait_for(scores(), 10))


def test_a_cancelled_request_leaves_its_actor_to_the_next() -> None:
    async def scores() -> None:
        sampler, grader = _Actor(is_instant=False), _Actor(is_instant=True)
        pools = Pools(
            {"sampler 0": sampler}, {"grader 0": grader}, sampling_timeout_s=10, grading_timeout_s=10, on_pause=print
        )
        first, second, third = (asyncio.create_task(_score(pools, work_unit)) for work_unit in _work_units(3))
        for _ in range(10):
            await asyncio.sleep(0)
        sampler.generate.answers[0].set_result(1)
        # In this event-loop turn the first releases the sampler, and the second is notified but has not resumed.
        while len(pools._samplers._waiting) > 1:
            await asyncio.sleep(0)
        second.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert [work.key.index for work in pools.assignments()] == [2]
        sampler.generate.answers[-1].set_result(1)
        await asyncio.gather(first, second, third, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scores(), 10))


def test_an_actor_that_has_just_answered_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = [100.0], []
    monkeypatch.setattr("actors.coordination.pool.time.monotonic", lambda: clock[0])

    class Counting(_Ready):
        async def remote(self) -> bool:
            asked.append(clock[0])
            return await super().remote()

    async def scores() -> None:
        sampler, grader = _Actor(is_instant=True), _Actor(is_instant=True)
        sampler.ready = Counting()
        pools = Pools(
            {"sampler 0": sampler}, {"grader 0": grader}, sampling_timeout_s=10, grading_timeout_s=10, on_pause=print
        )
        for seconds in (0.0, 0.5, 0.9, 1.1, 0.2):
            clock[0] += seconds
            await _score(pools, _work_units(1)[0])
        assert asked == [100.0, pytest.approx(102.5)]
        # After a failure it is probed again, however recent its last answer is.
        sampler.generate = _Method(is_instant=False)
        task = asyncio.create_task(_score(pools, _work_units(1)[0]))
        while not sampler.generate.answers:
            await asyncio.sleep(0)
        sampler.generate.answers[0].set_exception(ActorDiedError())
        with pytest.raises(WorkUnitFailedError, match="a sampler failed"):
            await task
        while pools.unreachable():
            await asyncio.sleep(0)
        asked.clear()
        sampler.generate = _Method(is_instant=True)
        await _score(pools, _work_units(1)[0])
        assert len(asked) == 1

    asyncio.run(asyncio.wait_for(scores(), 10))


class _Prefetching:
    """Counts the prefetches that it receives."""

    def __init__(self) -> None:
        self.num_asked = 0

    def options(self, concurrency_group: str) -> _Prefetching:
        assert concurrency_group == "weights"
        return self

    def remote(self, weights_id: WeightsId) -> None:
        self.num_asked += 1


class _Killable(_Actor):
    """An actor that records whether it was killed."""

    def __init__(self, *, is_instant: bool = False, is_up: bool = True) -> None:
        super().__init__(is_instant)
        self.is_ended = False
        self.prefetch = _Prefetching()
        if not is_up:
            self.ready.is_up.clear()

    def kill(self) -> None:
        self.is_ended = True


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_added_actors_work_once_up_and_surplus_actors_leave_when_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.coordination.pool.ray.kill", lambda actor: actor.kill())
    left: list[str] = []

    async def scores() -> None:
        actors = [_Killable(is_up=index != 2) for index in range(4)]
        named, graders = _named("sampler", actors), {"grader 0": _Actor(is_instant=True)}
        first = {"sampler 0": actors[0]}
        pools = Pools(first, graders, sampling_timeout_s=10, grading_timeout_s=10, on_pause=print, on_left=left.append)
        tasks = [asyncio.create_task(_score(pools, work_unit)) for work_unit in _work_units(3)]
        await _settle()
        pools.scale("sampler", 3, {name: named[name] for name in ("sampler 1", "sampler 2")})
        await _settle()
        # One works on the first work unit, a new one has the second, one is not up yet and has none.
        assert [work.key.index for work in pools.assignments()] == [0, 1]
        assert set(pools.unreachable()) == {"sampler 2"}
        pools.prefetch(WeightsId(version=1, digest=""))
        assert [actor.prefetch.num_asked for actor in actors] == [1, 1, 0, 0]
        # A repeated call, as Ray makes after the coordinator's death, changes nothing.
        pools.scale("sampler", 3, {name: named[name] for name in ("sampler 1", "sampler 2")})
        assert list(pools.members()) == ["sampler 0", "sampler 1", "sampler 2", "grader 0"]
        # One of three stays: an unreachable one leaves at once, a busy one after its work unit, and takes no new one.
        pools.scale("sampler", 1, {})
        assert (left, actors[2].is_ended, pools.leaving()) == (["sampler 2"], True, ["sampler 1"])
        assert pools.staying() == {"sampler": ["sampler 0"], "grader": ["grader 0"]}
        actors[1].generate.answers[0].set_result(1)
        await _settle()
        assert (left, actors[1].is_ended, pools.leaving()) == (["sampler 2", "sampler 1"], True, [])
        # Another may join while the last work unit waits.
        pools.scale("sampler", 2, {"sampler 3": actors[3]})
        await _settle()
        actors[3].generate.answers[0].set_result(1)
        actors[0].generate.answers[0].set_result(1)
        await asyncio.gather(*tasks)
        assert [len(actor.generate.answers) for actor in actors] == [1, 1, 0, 1]
        assert not actors[0].is_ended
        assert pools.use()["samplers"]["size"] == 2

    asyncio.run(asyncio.wait_for(scores(), 10))


def test_a_leaving_actor_leaves_even_if_its_work_unit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.coordination.pool.ray.kill", lambda actor: actor.kill())

    async def scores() -> None:
        actors = [_Killable(), _Killable()]
        pools = Pools(_named("sampler", actors), {}, sampling_timeout_s=10, grading_timeout_s=10, on_pause=print)
        tasks = [asyncio.create_task(_score(pools, work_unit)) for work_unit in _work_units(2)]
        await _settle()
        pools.scale("sampler", 1, {})
        actors[1].generate.answers[0].set_exception(ActorDiedError())
        with pytest.raises(WorkUnitFailedError):
            await tasks[1]
        assert actors[1].is_ended
        assert list(pools.members()) == ["sampler 0"]
        assert pools.unreachable() == {}
        tasks[0].cancel()

    asyncio.run(asyncio.wait_for(scores(), 10))


def test_utilization_is_relative_to_each_actors_time_in_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("actors.coordination.pool.time.monotonic", lambda: clock[0])

    async def scores() -> None:
        actors = [_Killable(), _Killable()]
        pools = Pools({"sampler 0": actors[0]}, {}, sampling_timeout_s=10, grading_timeout_s=10, on_pause=print)
        tasks = [asyncio.create_task(_score(pools, work_unit)) for work_unit in _work_units(2)]
        await _settle()
        clock[0] += 6
        pools.scale("sampler", 2, {"sampler 1": actors[1]})
        # It is not up for two of the ten seconds in which both were members.
        clock[0] += 2
        await _settle()
        assert pools.use()["samplers"] == {"size": 2, "away": 0, "busy": 0.8}
        for task in tasks:
            task.cancel()

    asyncio.run(asyncio.wait_for(scores(), 10))


def test_a_free_actor_that_does_not_answer_passes_its_work_unit_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.coordination.pool.SILENT_S", 0.05)

    async def scores() -> None:
        hung, well, grader = _Killable(is_up=False), _Killable(is_instant=True), _Actor(is_instant=True)
        samplers = _named("sampler", [hung, well])
        pools = Pools(samplers, {"grader 0": grader}, sampling_timeout_s=10, grading_timeout_s=10, on_pause=print)
        await _score(pools, _work_units(1)[0])
        assert len(well.generate.answers) == 1
        assert set(pools.unreachable()) == {"sampler 0"}

    asyncio.run(asyncio.wait_for(scores(), 10))


def test_the_run_pauses_while_no_sampler_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = [100.0], []
    monkeypatch.setattr("actors.coordination.pool.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("actors.coordination.pool.RESTART_POLL_S", 0.0)

    async def scores() -> None:
        actors = [_Killable(), _Killable()]
        pools = Pools(
            _named("sampler", actors),
            {"grader 0": _Actor(is_instant=True)},
            sampling_timeout_s=10,
            grading_timeout_s=10,
            on_pause=told.append,
        )
        tasks = [asyncio.create_task(_score(pools, work_unit)) for work_unit in _work_units(2)]
        await _settle()
        for seconds, actor in zip((0, 30), actors, strict=True):
            clock[0] += seconds
            actor.ready.is_up.clear()
            actor.generate.answers[0].set_exception(ActorDiedError())
            await _settle()
            pools.check_outages()
            assert pools.running_s == math.inf
        # For at least fifteen seconds no actor has been up. This is reported once.
        clock[0] += 16
        pools.check_outages()
        pools.check_outages()
        assert (pools.running_s, told) == (0, ["no sampler is up; the work waits until one is"])
        actors[1].ready.is_up.set()
        await _settle()
        pools.check_outages()
        clock[0] += 3
        assert (pools.running_s, told[1:]) == (3, [None])
        await asyncio.gather(*tasks, return_exceptions=True)

    # The timeout is by the test's clock.
    asyncio.run(asyncio.wait_for(scores(), 1000))
