"""Liveness watch: names unresponsive actors within seconds and kills them, but not starting ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from actors.coordination import liveness
from actors.coordination.liveness import HUNG_S, SILENT_S, START_S, LivenessMonitor


class _Actor:
    """An actor whose `ready` answers, waits or fails as the test sets it."""

    def __init__(self) -> None:
        self.ready = self
        self.answers: list[asyncio.Future[Any]] = []

    def options(self, concurrency_group: str, max_task_retries: int) -> _Actor:
        assert (concurrency_group, max_task_retries) == ("liveness", 0)
        return self

    def remote(self) -> asyncio.Future[Any]:
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]


class _Case:
    def __init__(self) -> None:
        self.time_s = 0.0
        self.hung: list[tuple[str, float]] = []
        self.watch = LivenessMonitor(lambda name, _, seconds: self.hung.append((name, seconds)), lambda: self.time_s)

    def after(self, seconds: float) -> dict[str, float]:
        """Return the silent actors after so many seconds, with one sweep a second."""
        for _ in range(int(seconds)):
            self.time_s += 1
            self.watch.sweep()
        return self.watch.silent()


async def _turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_silent_actor_is_reported_and_then_ended_once() -> None:
    async def scene() -> None:
        case, actor = _Case(), _Actor()
        case.watch.probe("sampler 1", actor)
        await _turn()
        assert case.watch.starting() == {"sampler 1"}
        actor.answers[0].set_result(True)
        await _turn()
        assert case.watch.starting() == set()
        assert case.after(SILENT_S) == {}
        assert case.after(1) == {"sampler 1": SILENT_S + 1}
        assert case.hung == []
        case.after(HUNG_S - SILENT_S)
        assert case.hung == [("sampler 1", HUNG_S + 1)]
        case.after(3 * HUNG_S)
        assert len(case.hung) == 1, "what takes its place is starting"
        case.after(START_S)
        assert len(case.hung) == 2, "for too long"

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_an_actor_that_recovers_can_hang_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "PROBE_EVERY_S", 0.0)

    async def scene() -> None:
        case, actor = _Case(), _Actor()
        case.watch.probe("sampler 1", actor)
        await _turn()
        actor.answers[-1].set_exception(ActorDiedError())
        await _turn()
        monkeypatch.setattr(liveness, "PROBE_EVERY_S", 3.0)
        case.after(3 * HUNG_S)
        assert case.hung == [], "it is starting"
        actor.answers[-1].set_result(True)
        await _turn()
        case.after(HUNG_S + 1)
        assert len(case.hung) == 1

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_a_suspended_monitor_ends_no_actor() -> None:
    case = _Case()
    case.watch.record_heartbeat("learner rank 0", "zero")
    case.time_s += 10 * HUNG_S
    case.watch.sweep()
    assert case.hung == []
    assert case.watch.silent() == {}
    case.after(HUNG_S + 1)
    assert [name for name, _ in case.hung] == ["learner rank 0"]


def test_heartbeats_count_as_answers_and_forgotten_actors_are_not_monitored() -> None:
    case = _Case()
    case.watch.record_heartbeat("learner rank 0", "zero")
    case.watch.record_heartbeat("learner rank 1", "one")
    case.after(HUNG_S - 1)
    case.watch.record_heartbeat("learner rank 0", "zero")
    case.after(2)
    assert case.hung == [("learner rank 1", HUNG_S + 1)]
    case.watch.forget("learner rank 0", "learner rank 1")
    assert case.after(HUNG_S) == {}
    assert len(case.hung) == 1


def test_the_end_of_one_actor_may_forget_another() -> None:
    """As the end of a learner rank does with Ray Train's controller, which answers nothing while it replaces the
    rank."""
    case, ended = _Case(), list[str]()

    def end(name: str, _actor: Any, _seconds: float) -> None:
        ended.append(name)
        case.watch.forget("controller")

    case.watch = LivenessMonitor(end, lambda: case.time_s)
    case.watch.record_heartbeat("rank 0", _Actor())
    case.watch.record_heartbeat("controller", _Actor())
    assert case.after(HUNG_S + 1) == {}
    assert ended == ["rank 0"]
