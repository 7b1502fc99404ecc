"""Status of a run: assignments of its actors, and restarts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from ray.exceptions import ActorUnavailableError

from actors.coordination.liveness import LivenessMonitor
from actors.coordination.reporting.status import (
    STATUS,
    ActorState,
    ActorStatus,
    Assignment,
    RunStatus,
    actor_statuses,
    restarts_by_kind,
    silence_texts,
)
from actors.messages import WorkUnitKey

STATUS_OF_A_RUN = RunStatus(
    at=1000.0,
    stage="rl",
    round=12,
    num_rounds=400,
    policy_version=13,
    learner={"0": "round 12: training"},
    work_units={"waiting": 1, "running": 2, "ready": 0, "failed": 0},
    pools=(ActorStatus(name="sampler 0", state=ActorState.BUSY, work_unit="work unit 12:1", seconds=3.0),),
    waits=("sampler 1 silent for 20 s",),
    max_staleness=1,
    staleness=0.5,
    num_restarts={"coordinator": 1, "learner": 0},
    seconds={"sampling": 2.5, "training": 1.2, "publish": 0.1},
)


def test_a_status_round_trips(tmp_path: Path) -> None:
    assert RunStatus.read(tmp_path) is None
    STATUS_OF_A_RUN.write(tmp_path)
    assert RunStatus.read(tmp_path) == STATUS_OF_A_RUN
    replace(STATUS_OF_A_RUN, round=13).write(tmp_path)
    assert RunStatus.read(tmp_path) == replace(STATUS_OF_A_RUN, round=13)
    assert [path.name for path in tmp_path.iterdir()] == [STATUS]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pools": [{"name": "x", "state": "mad"}]}', '{"pools": 3}'])
def test_an_unreadable_status_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / STATUS).write_text(text)
    assert RunStatus.read(tmp_path) is None


def test_each_actor_is_busy_away_or_idle() -> None:
    evaluated = Assignment(actor="sampler 1", key=WorkUnitKey(round=-1, index=4), seconds=1.0)
    assert actor_statuses(["sampler 0", "sampler 1", "grader 0"], [evaluated], {"grader 0": 7.0}) == (
        ActorStatus(name="sampler 0", state=ActorState.IDLE, work_unit="", seconds=0.0),
        ActorStatus(name="sampler 1", state=ActorState.BUSY, work_unit="evaluation work unit 4", seconds=1.0),
        ActorStatus(name="grader 0", state=ActorState.UNREACHABLE, work_unit="", seconds=7.0),
    )


def test_restarts_are_counted_by_kind() -> None:
    counts = {"sampler 0": 2, "sampler 11": 1, "grader 0": 1, "the weight store": 1}
    assert restarts_by_kind(counts) == {"samplers": 3, "graders": 1, "the weight store": 1}


class _Restarting:
    """An actor whose `ready` is answered by one process, fails, and is then answered by another."""

    def __init__(self) -> None:
        self.ready = self
        self.answers: list[int | None] = [7, 7, None, 8]

    def options(self, concurrency_group: str, max_task_retries: int) -> _Restarting:
        assert max_task_retries == 0, "Ray would ask the next process instead of telling"
        return self

    async def remote(self) -> int:
        if not self.answers:
            return 8
        if (answer := self.answers.pop(0)) is None:
            raise ActorUnavailableError("it restarts", b"0" * 16)
        return answer


def test_an_answer_with_another_process_id_counts_as_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.coordination.liveness.PROBE_EVERY_S", 0.0)

    async def watch() -> dict[str, int]:
        watch, actor = LivenessMonitor(lambda name, actor, seconds: None), _Restarting()
        watch.probe("sampler 0", actor)
        watch.probe("sampler 1", _Restarting())
        watch.forget("sampler 1")
        while actor.answers:
            assert watch.num_restarts() == {}
            await asyncio.sleep(0)
        while not watch.num_restarts():
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        counts = watch.num_restarts()
        watch.forget("sampler")
        return counts

    assert asyncio.run(asyncio.wait_for(watch(), 10)) == {"sampler 0": 1}


def test_silent_and_pending_actors_are_named_in_the_status() -> None:
    key = WorkUnitKey(round=12, index=1)
    assignments = [Assignment(actor="sampler 1", key=key, seconds=40.0)]
    silent = {"sampler 1": 45.2, "grader 0": 16.0, "sampler 3": 61.0}
    assert silence_texts(silent, {"sampler 3"}, assignments) == [
        "sampler 1 silent for 45 s; work unit 12:1 waits for it",
        "grader 0 silent for 16 s",
        "sampler 3 not up after 61 s; check with `ray status` that the cluster has room for it",
    ]
