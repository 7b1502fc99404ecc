"""Who does not answer is named after seconds and ended before it costs minutes, and who is only starting is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from actors import liveness
from actors.liveness import HUNG_S, SILENT_S, Watch


class _Actor:
    """Its `ready` answers, waits or fails as it is told."""

    def __init__(self) -> None:
        self.ready = self
        self.answers: list[asyncio.Future[Any]] = []

    def options(self, concurrency_group: str) -> _Actor:
        assert concurrency_group == "liveness"
        return self

    def remote(self) -> asyncio.Future[Any]:
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]


class _Case:
    def __init__(self) -> None:
        self.time_s = 0.0
        self.hung: list[tuple[str, float]] = []
        self.watch = Watch(lambda name, _, seconds: self.hung.append((name, seconds)), lambda: self.time_s)

    def after(self, seconds: float) -> dict[str, float]:
        self.time_s += seconds
        self.watch.sweep()
        return self.watch.silent()


async def _turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_silence_is_told_and_then_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "PROBE_EVERY_S", 0.0)

    async def scene() -> None:
        case, actor = _Case(), _Actor()
        case.watch.ask("sampler 1", actor)
        await _turn()
        actor.answers[0].set_result(True)
        await _turn()
        assert case.after(SILENT_S - 1) == {}
        assert case.after(2) == {"sampler 1": SILENT_S + 1}
        assert case.hung == []
        case.after(HUNG_S)
        case.after(HUNG_S)
        assert case.hung == [("sampler 1", SILENT_S + 1 + HUNG_S)]
        # It was killed: its call fails, and what takes its place answers.
        actor.answers[-1].set_exception(ActorDiedError())
        await _turn()
        actor.answers[-1].set_result(True)
        await _turn()
        assert case.after(1) == {}
        case.after(HUNG_S)
        assert len(case.hung) == 2, "it can hang again"

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_who_has_not_answered_since_it_started_is_not_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "PROBE_EVERY_S", 0.0)

    async def scene() -> None:
        case, actor = _Case(), _Actor()
        case.watch.ask("sampler 0", actor)
        await _turn()
        assert case.after(10 * HUNG_S) == {"sampler 0": 10 * HUNG_S}, "told, for somebody may wait for it"
        assert case.hung == []

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_heartbeats_count_and_who_has_ended_is_not_missed() -> None:
    case = _Case()
    case.watch.heard("learner rank 0", "zero")
    case.watch.heard("learner rank 1", "one")
    case.after(HUNG_S - 1)
    case.watch.heard("learner rank 0", "zero")
    case.after(2)
    assert case.hung == [("learner rank 1", HUNG_S + 1)]
    case.watch.forget("learner rank ")
    assert case.after(HUNG_S) == {}
    assert len(case.hung) == 1
