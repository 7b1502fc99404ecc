"""Coordinator failover: its successor resumes from the learner's requests and records each once."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from actors.coordination import coordinator as module
from actors.coordination.coordinator import Coordinator
from actors.coordination.reporting.status import RunStatus
from actors.messages import Next, TrainedRound, WeightsId, WorkUnit, WorkUnitKey, WorkUnitSummary
from actors.resources import GpuSection
from actors.run_log import SOLVE_RATES, read_events
from actors.spec import Phase, RunSpec
from actors.weights.store import VersionMissingError
from learner.parallel.progress import Place
from rewards import Grade, SumsConfig

NOWHERE = "redis://127.0.0.1:1/0"
NOTHING = {"num_trained_completions": 0.0}
VALUES = {"sampling_s": 0.1, "training_s": 0.1, "publish_s": 0.1}


class _Prefetch:
    """Records the versions that a sampler is to prefetch."""

    def __init__(self) -> None:
        self.prefetched: list[int] = []

    def options(self, concurrency_group: str) -> _Prefetch:
        assert concurrency_group == "weights"
        return self

    def remote(self, weights_id: WeightsId) -> None:
        self.prefetched.append(weights_id.version)


class _Pool:
    """A fake sampler or grader: answers at once, never, or that the version is lost."""

    def __init__(self) -> None:
        self.generate = self.grade = self.ready = self
        self.prefetch = _Prefetch()
        self.mood = "well"
        self.asked: list[tuple[WeightsId, WorkUnitKey]] = []
        self.answers: list[asyncio.Future[Any]] = []
        self.num_calls = 0

    def options(self, **_: Any) -> _Pool:
        return self

    def remote(self, *arguments: Any) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not arguments:
            answer.set_result(True)
            return answer
        if isinstance(arguments[0], WeightsId):
            self.asked.append((arguments[0], arguments[1].key))
        if self.mood == "lost":
            cause = VersionMissingError("policy version 1 is not in the store")
            answer.set_exception(RayTaskError("generate", "traceback", cause).as_instanceof_cause())
        elif self.mood == "well":
            work_unit = arguments[1] if isinstance(arguments[0], WeightsId) else arguments[0]
            answer.set_result(_summary(work_unit))
        self.num_calls += 1
        self.answers.append(answer)
        return f"reference {self.num_calls}", answer


def _summary(work_unit: WorkUnit) -> WorkUnitSummary:
    size = len(work_unit.requests)
    return WorkUnitSummary(
        grades=tuple(Grade(reward=1.0, parts={}, correct=True) for _ in range(size)),
        texts=("7",) * size,
        num_tokens=(2,) * size,
        step_maps=((0, 1),) * size,
        num_forwards=(2,) * size,
        policy_versions=(1,) * size,
        failures=(),
        costs={},
    )


class _Case:
    """A run directory, its actors, and successive coordinators."""

    def __init__(self, spec: RunSpec, run_dir: Path) -> None:
        self.spec = spec.model_copy(update={"run_dir": run_dir})
        (run_dir / "checkpoints").mkdir(parents=True)
        (run_dir / "checkpoints" / "initial").symlink_to(spec.initial_checkpoint)
        self.sampler, self.grader, self.store = _Pool(), _Pool(), _Pool()
        self._coordinators: list[Coordinator] = []

    def coordinator(self, driver: str = "one") -> Coordinator:
        coordinator = Coordinator(
            self.spec,
            {"sampler 0": self.sampler},
            {"grader 0": self.grader},
            self.store,
            registry_url=NOWHERE,
            store_name="store",
            driver=driver,
        )
        self._coordinators.append(coordinator)
        return coordinator

    def events(self, name: str) -> list[dict[str, Any]]:
        if name == "failure":
            # No call waits until these are written.
            for coordinator in self._coordinators:
                coordinator._log.write_out()
        return [event for event in read_events(self.spec.run_dir) if event["event"] == name]


@pytest.fixture
def case(spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Case:
    monkeypatch.setattr(module, "RunGauges", lambda _: type("Gauges", (), {"show": lambda *_: None})())
    return _Case(spec, tmp_path / "run")


def _weights_id(version: int) -> WeightsId:
    return WeightsId(version=version, digest=f"digest {version}")


def _trained(round_index: int) -> TrainedRound:
    return TrainedRound(round=round_index, weights_id=_weights_id(round_index + 2), values=VALUES)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def test_a_restarted_coordinator_samples_the_round_again_from_the_same_weights(case: _Case) -> None:
    async def scene() -> None:
        first = case.coordinator()
        await first.learner_starting("group")
        what, references = await first.next_batch(0, _weights_id(1))
        assert (what, len(references)) == (Next.CONTINUE, first._plan.work_units_per_round)
        before = list(case.sampler.asked)
        second = case.coordinator()
        what, again = await second.next_batch(0, _weights_id(1))
        assert (what, len(again)) == (Next.CONTINUE, len(references))
        assert sorted(map(str, case.sampler.asked[len(before) :])) == sorted(map(str, before))
        (failure,) = case.events("failure")
        assert "the coordinator died and was restarted" in failure["what"]

    _run(scene())


def test_a_round_that_was_trained_on_is_recorded_once_whenever_the_coordinator_dies(case: _Case) -> None:
    async def scene() -> None:
        first = case.coordinator()
        await first.next_batch(0, _weights_id(1))
        plan = first._plan
        keys = [WorkUnitKey(round=0, index=index) for index in range(plan.work_units_per_round)]
        summaries = {key: _summary(plan.round_work_unit(0, key.index)) for key in keys}
        # The first dies before it hears of the round: its successor requests the work units from the learner.
        second = case.coordinator()
        assert not await second.published(_trained(0), None)
        assert case.events("round") == []
        assert await second.published(_trained(0), summaries)
        # It dies while answering, and Ray repeats the call to its successor.
        third = case.coordinator()
        assert await third.published(_trained(0), None)
        (event,) = case.events("round")
        assert (event["num_completions"], event["num_failed_groups"]) == (20, 0)
        # The next round is requested as if nothing had failed.
        what, _ = await third.next_batch(1, _weights_id(2))
        assert what is Next.CONTINUE
        assert await third.published(_trained(1), None)
        assert await third.published(_trained(1), None), "asked twice"
        assert [event["round"] for event in case.events("round")] == [0, 1]

    _run(scene())


def test_a_round_of_an_earlier_learner_group_is_not_mistaken_for_the_reported_one(case: _Case) -> None:
    async def scene() -> None:
        first = case.coordinator()
        await first.learner_starting("one")
        await first.next_batch(0, _weights_id(1))
        assert await first.published(_trained(0), None)
        await first.learner_starting("two")
        await first.learner_started("sft", {"round": 0, "policy_version": 1, "step": None})
        await first.next_batch(0, _weights_id(1))
        # It dies before it hears of the repeated round.
        second = case.coordinator()
        assert not await second.published(_trained(0), None)

    _run(scene())


def test_a_round_reported_with_the_next_request_is_recorded_once_whenever_the_coordinator_dies(case: _Case) -> None:
    async def scene() -> None:
        first = case.coordinator()
        await first.next_batch(0, _weights_id(1))
        keys = [WorkUnitKey(round=0, index=index) for index in range(first._plan.work_units_per_round)]
        summaries = {key: _summary(first._plan.round_work_unit(0, key.index)) for key in keys}
        # It dies before it hears of the round: its successor must not begin any work unit until it has them.
        second = case.coordinator()
        num_asked = len(case.sampler.asked)
        assert await second.next_batch(1, _weights_id(2), _trained(0)) == (Next.REPORT, [])
        assert (len(case.sampler.asked), case.events("round")) == (num_asked, [])
        assert await second.published(_trained(0), summaries)
        what, _ = await second.next_batch(1, _weights_id(2), _trained(0))
        assert what is Next.CONTINUE
        # It dies while answering, and Ray repeats the call to its successor.
        third = case.coordinator()
        what, _ = await third.next_batch(1, _weights_id(2), _trained(0))
        assert what is Next.CONTINUE
        assert [event["round"] for event in case.events("round")] == [0]

    _run(scene())


def test_a_round_reported_with_the_next_request_is_on_disk_before_the_answer(case: _Case) -> None:
    async def scene() -> None:
        coordinator = case.coordinator()
        await coordinator.next_batch(0, _weights_id(1))
        what, references = await coordinator.next_batch(1, _weights_id(2), _trained(0))
        assert (what, len(references)) == (Next.CONTINUE, coordinator._plan.work_units_per_round)
        assert [event["round"] for event in case.events("round")] == [0]

    _run(scene())


def test_rounds_on_stored_pairs_need_no_sampler_and_are_recorded_once_whenever_the_coordinator_dies(
    case: _Case,
) -> None:
    learner = case.spec.learner.model_copy(update={"pairs": Path("pairs.jsonl")})
    case.spec = case.spec.model_copy(update={"learner": learner})
    values = VALUES | {"num_trained_completions": 10.0, "completions/mean_length": 6.0, "preferred": 0.7}
    trained = [
        TrainedRound(round=index, weights_id=_weights_id(index + 2), values=values if index else VALUES | NOTHING)
        for index in (0, 1)
    ]

    async def scene() -> None:
        first = case.coordinator()
        assert await first.next_batch(0, _weights_id(1)) == (Next.CONTINUE, [])
        await first.announce(_weights_id(2), Phase.RL, 1)
        # It dies before it hears of the round, of which the learner has no summaries to repeat.
        second = case.coordinator()
        assert await second.next_batch(1, _weights_id(2), trained[0]) == (Next.REPORT, [])
        assert not await second.published(trained[0], None)
        assert await second.published(trained[0], {})
        assert await second.next_batch(1, _weights_id(2), trained[0]) == (Next.CONTINUE, [])
        assert await second.published(trained[1], None)
        assert (case.sampler.asked, case.sampler.prefetch.prefetched) == ([], [])
        skipped, event = case.events("round")
        assert (skipped["num_completions"], skipped["tokens_per_s"]) == (0, 0)
        assert (event["num_completions"], event["mean_tokens"], event["tokens_per_s"]) == (10, 6.0, 200.0)
        assert event["preferred"] == 0.7
        assert not {"reward", "correct", "mean_staleness", "num_failed_groups"} & event.keys()
        assert (case.spec.run_dir / SOLVE_RATES).read_text() == "", "nothing was solved"
        # Evaluations still are sampled.
        assert await second.evaluate(_weights_id(3), "rl", 2, True) is Next.CONTINUE
        assert case.sampler.asked

    _run(scene())


class _Disk:
    """A disk whose fsync does not return while it is blocked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers, fsync = threading.Event(), os.fsync
        self.answers.set()

        def slow(file: int) -> None:
            assert self.answers.wait(60)
            fsync(file)

        monkeypatch.setattr(os, "fsync", slow)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> _Disk:
    return _Disk(monkeypatch)


def test_samplers_work_while_the_coordinator_writes_to_disk(case: _Case, disk: _Disk) -> None:
    async def scene() -> None:
        coordinator = case.coordinator()
        await coordinator.next_batch(0, _weights_id(1))
        num_asked = len(case.sampler.asked)
        disk.answers.clear()
        waiting = asyncio.create_task(coordinator.next_batch(1, _weights_id(2), _trained(0)))
        while len(case.sampler.asked) < num_asked + coordinator._plan.work_units_per_round:
            await asyncio.sleep(0.001)
        assert await coordinator.heartbeat(0, _place("round 1: waiting"), "handle", "node") is False, (
            "it answers others"
        )
        assert not waiting.done()
        disk.answers.set()
        what, _ = await waiting
        assert what is Next.CONTINUE
        assert [event["round"] for event in case.events("round")] == [0]

    _run(scene())


def test_a_disk_that_does_not_answer_delays_only_what_must_be_on_it(
    case: _Case, disk: _Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def told(*_: object) -> bool:
        return True

    async def scene() -> None:
        coordinator = case.coordinator()
        monkeypatch.setattr(coordinator._announcer, "announce", told)
        await coordinator.next_batch(0, _weights_id(1))
        disk.answers.clear()
        must_be_on_disk = [
            asyncio.create_task(work)
            for work in (
                coordinator.published(_trained(0), None),
                coordinator.record("phase_end", {"phase": Phase.SFT, "seconds": 1.0, "num_steps": 3}),
                coordinator.evaluate(_weights_id(2), "round", 1, True),
                coordinator.learner_failed("ValueError: loss", False, False),
            )
        ]
        await asyncio.sleep(0.05)
        coordinator._log.note_failure("a sampler failed")
        what, _ = await coordinator.next_batch(1, _weights_id(2))
        assert what is Next.CONTINUE
        assert await coordinator.heartbeat(0, _place("round 1: training"), "handle", "node") is False
        await coordinator.announce(_weights_id(3), Phase.RL, 2)
        must_be_on_disk.append(asyncio.create_task(coordinator.stop()))
        await asyncio.sleep(0.01)
        # What is not on disk yet would be unknown after a restart, so followers do not see it.
        assert await coordinator.events_since(0) == []
        assert (await coordinator.status()).log["num_waiting"] >= 4
        assert [task.done() for task in must_be_on_disk] == [False] * len(must_be_on_disk)
        disk.answers.set()
        await asyncio.gather(*must_be_on_disk)
        assert {"round", "phase_end", "failure"} <= {event["event"] for event in read_events(case.spec.run_dir)}
        assert await coordinator.events_since(0) == read_events(case.spec.run_dir)
        successor = case.coordinator()
        assert await successor.heartbeat(0, _place("round 1: training"), "handle", "node"), "the stop is on disk too"

    _run(scene())


def test_the_end_of_a_run_waits_for_a_slow_disk(case: _Case, disk: _Disk) -> None:
    async def scene() -> None:
        coordinator = case.coordinator()
        await coordinator.next_batch(0, _weights_id(1))
        disk.answers.clear()
        for index in range(9):
            coordinator._log.note_failure(f"failure {index}")
        ending = asyncio.create_task(coordinator.finish())
        await asyncio.sleep(0.05)
        assert not ending.done()
        assert await coordinator.heartbeat(0, _place("ending"), "handle", "node") is False
        disk.answers.set()
        await ending
        *failures, done = read_events(case.spec.run_dir)
        assert [event["what"] for event in failures][:9] == [f"failure {index}" for index in range(9)]
        assert done["event"] == "done"

    _run(scene())


def test_a_restarted_learner_cancels_the_request_of_the_previous_group(case: _Case, disk: _Disk) -> None:
    async def scene() -> None:
        coordinator = case.coordinator()
        await coordinator.next_batch(0, _weights_id(1))
        disk.answers.clear()
        waiting = asyncio.create_task(coordinator.next_batch(1, _weights_id(2), _trained(0)))
        await asyncio.sleep(0.01)
        starting = asyncio.create_task(coordinator.learner_starting("another"))
        await asyncio.sleep(0.01)
        disk.answers.set()
        await starting
        with pytest.raises(RuntimeError, match="has restarted"):
            await waiting

    _run(scene())


def test_an_event_named_stopped_cancels_nothing(case: _Case) -> None:
    async def scene() -> None:
        coordinator = case.coordinator()
        case.sampler.mood = "silent"
        coordinator._rounds.begin(0, _weights_id(1))
        await coordinator.record("stopped", {"phase": "rl", "round": 0, "step": None})
        assert coordinator._rounds.counts()["running"]
        await coordinator.stopped({"phase": "rl", "round": 0, "step": None})
        assert coordinator._rounds.counts() == {}

    _run(scene())


def test_versions_that_nothing_is_sampled_from_are_forgotten(case: _Case) -> None:
    rounds = case.spec.learner.max_staleness + 6
    case.spec = case.spec.model_copy(update={"learner": case.spec.learner.model_copy(update={"num_rounds": rounds})})

    async def scene() -> None:
        coordinator = case.coordinator()
        for index in range(rounds):
            await coordinator.next_batch(index, _weights_id(index + 1))
            assert await coordinator.published(_trained(index), None)
        assert len(coordinator._rounds._weights_ids) == case.spec.learner.max_staleness + 2
        assert coordinator._rounds.newest_version == rounds + 1

    _run(scene())


def test_an_event_whose_answer_was_lost_is_not_written_twice(case: _Case) -> None:
    async def scene() -> None:
        values = {"phase": Phase.SFT, "step": 3, "loss": 1.5, "loss_at_t": (1.0, 2.0)}
        first = case.coordinator()
        await first.record("sft", values)
        await first.record("sft", values | {"step": 4})
        second = case.coordinator()
        await second.record("sft", values | {"step": 4})
        await second.record("sft", values | {"step": 5})
        assert [event["step"] for event in case.events("sft")] == [3, 4, 5]

    _run(scene())


def test_a_lost_version_is_published_again_and_costs_no_attempt(case: _Case) -> None:
    async def scene() -> None:
        coordinator = case.coordinator()
        case.sampler.mood = "lost"
        for _ in range(case.spec.rollout.max_attempts + 2):
            assert await coordinator.next_batch(0, _weights_id(1)) == (Next.PUBLISH, [])
        assert await coordinator.evaluate(_weights_id(1), "sft", 0, True) is Next.PUBLISH
        case.sampler.mood = "well"
        what, references = await coordinator.next_batch(0, _weights_id(1))
        assert (what, len(references)) == (Next.CONTINUE, coordinator._plan.work_units_per_round)
        what = await coordinator.evaluate(_weights_id(1), "sft", 0, True)
        assert what is Next.CONTINUE

    _run(scene())


def test_a_stop_ends_waits_and_survives_the_coordinator_but_not_the_driver(case: _Case) -> None:
    async def scene() -> None:
        coordinator = case.coordinator()
        case.sampler.mood = "silent"
        waiting = asyncio.create_task(coordinator.next_batch(0, _weights_id(1)))
        await asyncio.sleep(0.01)
        assert not await coordinator.stop(), "no rank is up"
        assert await waiting == (Next.STOP, [])
        assert await coordinator.heartbeat(0, _place("round 0: training"), "handle", "node")
        assert await coordinator.stop()
        successor = case.coordinator()
        assert await successor.heartbeat(0, _place("round 0: training"), "handle", "node")
        assert await successor.evaluate(_weights_id(1), "sft", 0, True) is Next.STOP
        assert not await case.coordinator("two").heartbeat(0, _place("starting"), "handle", "node")

    _run(scene())


@pytest.mark.parametrize("label", ["", "round"], ids=["round", "round and evaluation"])
def test_actors_killed_after_a_stop_are_not_recorded_as_failures(case: _Case, label: str) -> None:
    async def scene() -> None:
        coordinator = case.coordinator()
        case.sampler.mood = "silent"
        await coordinator.heartbeat(0, _place("round 0: training"), "handle", "node")
        # As with samplers that run ahead: the learner trains, and does not wait, when the stop arrives.
        coordinator._rounds.begin(0, _weights_id(1))
        if label:
            coordinator._evaluation.start_background(_weights_id(1), label, -1.0)
        await asyncio.sleep(0.01)
        assert await coordinator.stop()
        await coordinator.stopped({"phase": "rl", "round": 0, "step": None})
        await asyncio.sleep(0.01)
        for answer in case.sampler.answers:
            if not answer.done():
                answer.set_exception(ActorDiedError())
        await asyncio.sleep(0.01)
        assert case.sampler.answers
        assert case.events("failure") == []

    _run(scene())


class _Offload:
    """Records after how many work units a sampler was offloaded."""

    def __init__(self, sampler: _Pool) -> None:
        self._sampler, self.at = sampler, list[int]()

    async def remote(self) -> None:
        self.at.append(len(self._sampler.asked))


@pytest.mark.parametrize("colocate", [False, True])
def test_colocated_samplers_are_offloaded_before_the_learner_continues(case: _Case, colocate: bool) -> None:
    case.spec = case.spec.model_copy(update={"gpus": GpuSection(colocate=colocate)})
    offload = _Offload(case.sampler)
    case.sampler.offload = offload

    async def scene() -> None:
        coordinator = case.coordinator()
        per_round = coordinator._plan.work_units_per_round
        await coordinator.learner_starting("group")
        await coordinator.evaluate(_weights_id(1), "sft", 0, True)
        num_evaluated = len(case.sampler.asked)
        await coordinator.next_batch(0, _weights_id(1))
        case.sampler.mood = "lost"
        assert await coordinator.evaluate(_weights_id(2), "rl", 1, True) is Next.PUBLISH
        asked = len(case.sampler.asked)
        assert asked > num_evaluated + per_round
        assert offload.at == ([0, num_evaluated, num_evaluated + per_round, asked] if colocate else [])
        case.sampler.mood = "silent"
        waiting = asyncio.create_task(coordinator.next_batch(1, _weights_id(2)))
        await asyncio.sleep(0.01)
        await coordinator.stop()
        assert await waiting == (Next.STOP, [])
        # No work unit is retried: that would onload the sampler while the learner writes its checkpoint.
        assert (coordinator._rounds.next_round is None) == colocate
        assert len(offload.at) == (5 if colocate else 0)

    _run(scene())


def test_work_units_that_cannot_be_fetched_are_sampled_again(case: _Case) -> None:
    async def scene() -> None:
        coordinator = case.coordinator()
        _, references = await coordinator.next_batch(0, _weights_id(1))
        await coordinator.forget(0)
        _, others = await coordinator.next_batch(0, _weights_id(1))
        assert len(others) == len(references)
        assert not set(others) & set(references)

    _run(scene())


def test_the_status_names_the_work_units_that_the_learner_waits_for(
    case: _Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.coordination.monitor.SILENT_S", -1.0)
    # Reported seconds are rounded, so the clock is frozen.
    clock = SimpleNamespace(monotonic=lambda: 100.0, time=time.time)
    for name in ("samplers_turn", "supervisor", "monitor", "pool"):
        monkeypatch.setattr(f"actors.coordination.{name}.time", clock)

    async def scene() -> None:
        coordinator = case.coordinator()
        await coordinator.record("phase", {"phase": Phase.RL, "num_steps": 2})
        case.sampler.mood = "silent"
        waiting = asyncio.create_task(coordinator.next_batch(0, _weights_id(1)))
        await coordinator.heartbeat(1, _place("round 0: waiting for completions"), "handle", "node")
        await asyncio.sleep(0.05)
        status = await coordinator.status()
        assert (status.stage, status.round, status.policy_version) == ("rl", 0, 1)
        assert status.learner == {"1": "round 0: waiting for completions"}
        assert status.work_units["running"] == coordinator._plan.work_units_per_round
        assert [(actor.name, actor.work_unit) for actor in status.pools] == [
            ("sampler 0", "work unit 0:0"),
            ("grader 0", ""),
        ]
        assert status.waits[0].startswith(
            "round 0 has waited 0 s for work unit 0:0 (sampler 0, 0 s), work unit 0:1 (no free"
        )
        status.write(case.spec.run_dir)
        assert RunStatus.read(case.spec.run_dir) == status
        waiting.cancel()

    _run(scene())


def test_a_learner_that_fails_repeatedly_is_given_up_with_its_own_error(case: _Case) -> None:
    async def scene() -> None:
        coordinator = case.coordinator()
        for attempt in range(3):
            assert await coordinator.learner_starting(f"group {attempt}") == {}
            await coordinator.learner_started("sft", {"round": 0, "policy_version": 1, "step": None})
            assert await coordinator.learner_failed("OSError: no space", is_echo=False, is_transient=True)
            assert await coordinator.learner_failed("RuntimeError: gloo", is_echo=True, is_transient=False)
            coordinator = case.coordinator() if attempt == 1 else coordinator
        assert not await coordinator.learner_starting("one more")
        assert await coordinator.gave_up() == "OSError: no space"
        failures = [event["what"] for event in case.events("failure")]
        assert failures.count("a learner worker failed: OSError: no space") == 3

    _run(scene())


def test_the_same_error_in_two_learner_groups_without_progress_ends_the_run(case: _Case) -> None:
    async def scene() -> None:
        coordinator = case.coordinator()
        nan, bad = "FloatingPointError: round 0: nan", "ValueError: bad"
        for attempt, (what, may_go_on) in enumerate([(nan, True), (bad, True), (nan, True), (nan, False)]):
            assert await coordinator.learner_starting(f"group {attempt}") == {}
            if attempt in (0, 2):
                await coordinator.record("checkpoint", {"phase": "sft", "path": "sft", "step": attempt, "seconds": 0.0})
            assert await coordinator.learner_failed(what, is_echo=False, is_transient=False) is may_go_on
            assert (
                await coordinator.learner_failed(
                    "rank 1 lost its connection to another rank", is_echo=True, is_transient=False
                )
                is may_go_on
            )
        assert await coordinator.gave_up() == nan

    _run(scene())


@pytest.mark.parametrize("section", ["learner", "sft"])
def test_a_learner_out_of_gpu_memory_restarts_with_halved_micro_batches(case: _Case, section: str) -> None:
    """In SFT the first value is a worker's whole share of a step."""
    tokens, canvas = case.spec.learner.micro_batch_tokens, case.spec.canvas_tokens
    if section == "sft":
        tokens, canvas = case.spec.sft.batch_size // case.spec.learner.num_workers * canvas, case.spec.sft_tokens
    what, said = "round 3: the GPU of rank 1 is out of memory (CUDA out of memory)", []

    async def scene() -> None:
        coordinator = case.coordinator()
        expected, found = tokens, await coordinator.learner_starting("first")
        assert found == {}
        while expected >= canvas:
            assert await coordinator.learner_failed(what, is_echo=False, is_transient=False, too_large=section)
            await coordinator.learner_failed(
                "rank 0 lost its connection to another rank", is_echo=True, is_transient=False
            )
            said.append(f"retrying with micro-batches of {expected // 2} tokens instead of {expected}")
            expected //= 2
            # It must survive a coordinator's death.
            coordinator = case.coordinator()
            found = await coordinator.learner_starting(f"group {expected}")
            assert found == {section: expected if expected >= canvas else 2 * expected}
        last = [event["what"] for event in case.events("failure") if what in event["what"]][-1]
        assert f"micro-batches of {expected * 2} tokens cannot be halved, a canvas has {canvas}: take sharding." in last
        may_go_on = await coordinator.learner_failed(what, is_echo=False, is_transient=False, too_large=section)
        assert not may_go_on
        assert await coordinator.learner_starting("in vain") is None
        assert (await coordinator.gave_up()).startswith(f"{what}; micro-batches of {expected * 2} tokens cannot")

    _run(scene())
    found = [event["what"] for event in case.events("failure") if "; retrying with" in event["what"]]
    assert found == [f"a learner worker failed: {what}; {one}" for one in said[:-1]]


def test_a_resumed_run_reports_what_it_repeats(case: _Case) -> None:
    async def scene() -> None:
        coordinator = case.coordinator()
        await coordinator.next_batch(0, _weights_id(1))
        await coordinator.published(_trained(0), None)
        await coordinator.learner_starting("one")
        await coordinator.learner_started("sft", {"round": 0, "policy_version": 1, "step": None})
        (event,) = case.events("resume")
        assert event["what"] == "going on from checkpoint sft; round 0 is repeated"
        await coordinator.learner_starting("two")
        await coordinator.learner_started("rl-000001", {"round": 1, "policy_version": 2, "step": None})
        assert case.events("failure")[-1]["what"].endswith("restarted from checkpoint rl-000001; nothing is repeated")

    _run(scene())


def test_a_run_resumed_from_its_start_reports_it_and_a_new_run_does_not(case: _Case) -> None:
    async def scene() -> None:
        first, start = case.coordinator(), {"round": 0, "policy_version": 0, "step": None}
        await first.learner_starting("one")
        await first.learner_started("initial", start)
        assert case.events("resume") == []
        await first.record("phase", {"phase": Phase.RL, "num_steps": 2})
        await first.next_batch(0, _weights_id(1))
        await first.published(_trained(0), None)
        resumed = case.coordinator("another driver")
        await resumed.learner_starting("two")
        await resumed.learner_started("initial", start)
        (event,) = case.events("resume")
        assert event["what"] == "going on from checkpoint initial; round 0 is repeated"

    _run(scene())


def test_an_echo_of_another_ranks_failure_does_not_end_the_run(case: _Case) -> None:
    async def scene() -> None:
        coordinator = case.coordinator()
        for attempt in range(8):
            assert await coordinator.learner_starting(f"group {attempt}") == {}
            for _ in range(3):
                await coordinator.learner_failed(
                    "rank 0 lost its connection to another rank", is_echo=True, is_transient=False
                )
        assert len(case.events("failure")) == 8, "once for each start"

    _run(scene())


def test_an_evaluation_is_cancelled_with_the_learner_that_requested_it(case: _Case) -> None:
    async def scene() -> None:
        coordinator = case.coordinator()
        case.sampler.mood = "silent"
        orphan = asyncio.create_task(coordinator.evaluate(_weights_id(1), "sft", 0, True))
        await asyncio.sleep(0.05)
        await coordinator.learner_starting("the next group")
        assert await orphan is Next.STOP
        assert case.events("evaluation") == []

    _run(scene())


def test_an_evaluation_whose_answer_was_lost_is_not_recorded_twice(case: _Case) -> None:
    async def scene() -> None:
        await case.coordinator().evaluate(_weights_id(1), "sft", 0, True)
        successor = case.coordinator()
        assert await successor.evaluate(_weights_id(1), "sft", 0, True) is Next.CONTINUE
        assert len(case.events("evaluation")) == 1
        await successor.learner_starting("the next group")
        await successor.learner_started("initial", {"round": 0, "policy_version": 1, "step": None})
        await successor.evaluate(_weights_id(1), "sft", 0, True)
        assert len(case.events("evaluation")) == 2, "of a version that was made again"

    _run(scene())


def test_an_evaluation_of_retrained_weights_is_not_taken_from_the_log(case: _Case) -> None:
    async def scene() -> None:
        coordinator = case.coordinator()
        await coordinator.next_batch(0, _weights_id(1))
        await coordinator.published(_trained(0), None)
        await coordinator.evaluate(_weights_id(2), "rl", 1, True)
        await coordinator.learner_starting("the next group")
        await coordinator.next_batch(0, _weights_id(1))
        await coordinator.published(_trained(0), None)
        for _ in range(2):
            # A resumed run requests evaluations that an ended stage may lack.
            assert await coordinator.evaluate(_weights_id(2), "rl", 1, False) is Next.CONTINUE
        assert len(case.events("evaluation")) == 2

    _run(scene())


def _asked_in_turn(case: _Case) -> list[str]:
    """Return the rounds of the sampler's work units, with consecutive units of one kind merged."""
    named = ["evaluation" if key.is_of_evaluation else f"round {key.round}" for _, key in case.sampler.asked]
    return [name for name, before in zip(named, ["", *named], strict=False) if name != before]


def test_a_background_evaluation_runs_between_the_work_units_of_two_rounds(case: _Case) -> None:
    case.spec = case.spec.model_copy(update={"learner": case.spec.learner.model_copy(update={"max_staleness": 1})})

    async def scene() -> None:
        coordinator = case.coordinator()
        await coordinator.next_batch(0, _weights_id(1), None, "round")
        await coordinator.next_batch(0, _weights_id(1), None, "round")
        await coordinator.published(_trained(0), None)
        assert case.events("evaluation") == [], "the learner has not asked yet"
        assert await coordinator.evaluate(_weights_id(1), "round", 0, True) is Next.CONTINUE
        assert _asked_in_turn(case) == ["round 0", "evaluation", "round 1"]
        keys = [key for _, key in case.sampler.asked if key.is_of_evaluation]
        assert len(keys) == len(set(keys)) > 1, "once"
        assert {weights_id.version for weights_id, key in case.sampler.asked if key in keys} == {1}
        (event,) = case.events("evaluation")
        assert (event["policy_version"], event["round"], event["num_correct"]) == (1, 0, event["num_problems"])
        # A later request starts a new evaluation.
        await coordinator.evaluate(_weights_id(2), "rl", 1, True)
        assert [event["policy_version"] for event in case.events("evaluation")] == [1, 2]

    _run(scene())


def test_a_background_evaluation_survives_a_restart_and_a_lost_version(case: _Case) -> None:
    async def scene() -> None:
        first = case.coordinator()
        await first.next_batch(0, _weights_id(1), None, "round")
        second = case.coordinator()
        assert await second.evaluate(_weights_id(1), "round", 0, True) is Next.CONTINUE
        # An evaluation in the log must not start again, as when Ray repeats the call.
        asked = len(case.sampler.asked)
        await second.next_batch(0, _weights_id(1), None, "round")
        assert len([key for _, key in case.sampler.asked[asked:] if key.is_of_evaluation]) == 0
        case.sampler.mood = "lost"
        assert await second.next_batch(1, _weights_id(2), None, "round") == (Next.PUBLISH, [])
        case.sampler.mood = "well"
        await second.next_batch(1, _weights_id(2), None, "round")
        assert await second.evaluate(_weights_id(2), "round", 1, True) is Next.CONTINUE
        assert [event["policy_version"] for event in case.events("evaluation")] == [1, 2]

    _run(scene())


def test_an_evaluation_does_not_wait_for_the_registry(case: _Case, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, may_answer = [], threading.Event()

    def score(_: object, version: int, *counts: int) -> bool:
        may_answer.wait(60)
        heard.append(version)
        return True

    monkeypatch.setattr("actors.registry.registry.Registry.score", score)

    async def scene() -> None:
        coordinator = case.coordinator()
        for version in (1, 2):
            assert await coordinator.evaluate(_weights_id(version), "sft", 0, True) is Next.CONTINUE
        assert heard == []
        may_answer.set()
        await coordinator.finish()
        assert heard == [1, 2]

    _run(scene())


def test_an_unannounced_version_survives_a_restart_of_the_coordinator(
    case: _Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[int, str, int]] = []

    def away(*_: object) -> None:
        raise ConnectionError("the registry is away")

    def hear(_: object, policy: Any, began_at: float | None) -> bool:
        heard.append((policy.version, policy.manifest_digest, policy.round))
        return True

    async def scene() -> None:
        for name in ("announce", "ping"):
            monkeypatch.setattr(f"actors.registry.registry.Registry.{name}", away)
        first = case.coordinator()
        for version in (1, 2):
            await first.announce(_weights_id(version), Phase.RL, version - 1)
        assert first._announcer._sending is not None
        await first._announcer._sending
        monkeypatch.setattr("actors.registry.registry.Registry.ping", lambda _: None)
        monkeypatch.setattr("actors.registry.registry.Registry.announce", hear)
        monkeypatch.setattr("actors.registry.registry.Registry.restore", lambda *_: 0)
        second = case.coordinator()
        second._announcer.retry()
        await second._announcer.flush()
        # Earlier versions must not be announced to the service.
        assert heard == [(2, "digest 2", 1)]
        await second.announce(_weights_id(3), Phase.RL, 2)
        await case.coordinator()._announcer.flush()
        assert heard[1:] == [(3, "digest 3", 2)], "it has heard of it"

    _run(scene())


@pytest.mark.parametrize("ends", ["learner", "stop"])
def test_a_background_evaluation_is_cancelled_with_the_learner_and_with_the_run(case: _Case, ends: str) -> None:
    async def scene() -> None:
        coordinator = case.coordinator()
        case.sampler.mood = "silent"
        waiting = asyncio.create_task(coordinator.next_batch(0, _weights_id(1), None, "round"))
        await asyncio.sleep(0.05)
        assert coordinator._evaluation._background is not None
        scoring = coordinator._evaluation._background[1]
        await (coordinator.learner_starting("the next group") if ends == "learner" else coordinator.stop())
        assert (await waiting)[0] is Next.STOP
        with pytest.raises(asyncio.CancelledError):
            await scoring
        assert coordinator._evaluation._background is None
        assert case.events("evaluation") == []

    _run(scene())


def _place(activity: str) -> Place:
    return Place(num_marks=0, activity=activity, where="", is_in_collective=False, bound_s=900.0)


class _Controller:
    """A fake of Ray Train's controller: it answers a given number of times, then never."""

    def __init__(self, num_answers: int = 1) -> None:
        self.get_training_failed_error = self
        self.num_answers = num_answers

    def options(self, max_task_retries: int) -> _Controller:
        assert max_task_retries == 0
        return self

    def remote(self) -> asyncio.Future[None]:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.num_answers:
            self.num_answers -= 1
            answer.set_result(None)
        return answer


def test_a_controller_that_may_wait_for_resources_is_given_that_time_too(
    case: _Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.coordination.monitor._EVERY_S", 1e6)
    learner = case.spec.learner.model_copy(update={"num_workers": 2, "min_workers": 1, "resource_timeout_s": 300.0})
    case.spec = case.spec.model_copy(update={"learner": learner})

    async def scene() -> None:
        coordinator = case.coordinator()
        await coordinator.heartbeat(0, _place("a step"), "rank", "node", _Controller())
        assert coordinator._supervisor.liveness._actors["Ray Train's controller"].hung_s == 390

    _run(scene())


@pytest.mark.parametrize(("beating", "num_answers"), [(True, 1), (True, 0), (False, 1)])
def test_a_silent_controller_is_killed_unless_it_may_be_starting_ranks(
    beating: bool, num_answers: int, case: _Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped controller would leave `d1 train` waiting forever after the learner ends. It may also stop right after
    it has started the ranks."""
    controller, ended = _Controller(num_answers), list[object]()
    monkeypatch.setattr(module.ray, "kill", lambda actor, **_: ended.append(actor))
    monkeypatch.setattr("actors.coordination.monitor._EVERY_S", 1e6)

    async def scene() -> None:
        coordinator, time_s = case.coordinator(), 0.0
        liveness = coordinator._supervisor.liveness
        liveness._now, liveness._swept_at = lambda: time_s, 0.0
        await coordinator.heartbeat(0, _place("a step"), "rank", "node", controller)
        await asyncio.sleep(0.01)
        for _ in range(100):
            time_s += 1
            if beating:
                await coordinator.heartbeat(0, _place("a step"), "rank", "node", controller)
            liveness.sweep()
        # The case's other actors never answer.
        assert [one for one in ended if one in (controller, "rank")] == [controller if beating else "rank"]
        said = [event["what"] for event in case.events("failure") if "controller" in event["what"]]
        assert len(said) == beating
        assert all(what.startswith("Ray Train's controller was silent for 91 s and is ended") for what in said)

    _run(scene())


def test_a_grader_times_out_after_the_time_limits_of_its_work_unit(
    case: _Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SumsConfig, "max_grading_s", 2.5)
    limit_s = case.coordinator()._pools._graders.timeout_s
    assert limit_s == case.spec.grading_timeout_s == case.spec.grading.timeout_s + 8 * 2.5


def test_samplers_prefetch_published_weights_while_they_work(case: _Case) -> None:
    async def scene() -> None:
        coordinator = case.coordinator()
        num_rounds = case.spec.learner.num_rounds
        for phase, round_index in ((Phase.SFT, 0), (Phase.RL, 1), (Phase.RL, num_rounds), (Phase.CONTROL, num_rounds)):
            await coordinator.announce(_weights_id(len(case.sampler.prefetch.prefetched) + 1), phase, round_index)
        assert case.sampler.prefetch.prefetched == [1], "not after the last round"

    _run(scene())


def test_a_resized_pool_is_restored_after_a_restart(case: _Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(module.ray, "kill", ended.append)
    case.sampler.mood = "silent"
    more = {"sampler 1": _Pool(), "sampler 2": _Pool()}

    def found(name: str, namespace: str) -> Any:
        assert namespace == "d1"
        return {f"{case.spec.name}-sampler-1": more["sampler 1"]}[name]

    monkeypatch.setattr(module.ray, "get_actor", found)

    async def scene() -> None:
        first = case.coordinator()
        await first.learner_starting("group")
        waiting = asyncio.create_task(first.next_batch(0, _weights_id(1)))
        await asyncio.sleep(0.01)
        await first.scale("sampler", 3, more)
        await first.scale("sampler", 3, more)
        await asyncio.sleep(0.01)
        assert [actor.name for actor in (await first.status()).pools] == [
            *("sampler 0", "sampler 1", "sampler 2"),
            "grader 0",
        ]
        # The newest actors are idle and leave at once.
        await first.scale("sampler", 1, {})
        assert ended == [more["sampler 2"], more["sampler 1"]]
        ended.clear()
        await first.scale("sampler", 2, {"sampler 1": more["sampler 1"]})
        waiting.cancel()
        assert [(event["before"], event["after"]) for event in case.events("scale")] == [(1, 3), (3, 1), (1, 2)]

        second = case.coordinator()
        assert list(second._pools.members()) == ["sampler 0", "sampler 1", "grader 0"]
        assert second._pools.members()["sampler 1"] is more["sampler 1"]
        assert ended == []
        case.sampler.mood = "well"
        what, references = await second.next_batch(0, _weights_id(1))
        assert (what, len(references)) == (Next.CONTINUE, second._plan.work_units_per_round)

    _run(scene())


def test_leaving_actors_are_killed_after_a_restart(case: _Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(module.ray, "kill", ended.append)
    monkeypatch.setattr(module.ray, "get_actor", lambda name, namespace: name)
    case.sampler.mood = "silent"

    async def scene() -> None:
        first = case.coordinator()
        await first.learner_starting("group")
        await first.scale("grader", 2, {"grader 1": _Pool()})
        waiting = asyncio.create_task(first.next_batch(0, _weights_id(1)))
        await asyncio.sleep(0.01)
        await first.scale("sampler", 0, {})
        assert ended == []
        case.coordinator()
        assert ended == [f"{case.spec.name}-sampler-0"]
        # It is not killed a second time.
        assert list(case.coordinator()._pools.members()) == ["grader 0", "grader 1"]
        assert len(ended) == 1
        waiting.cancel()

    _run(scene())


def test_a_restarted_coordinator_draws_the_same_problems_from_the_solve_rates(case: _Case) -> None:
    rollout = case.spec.rollout.model_copy(update={"curriculum": 4})
    case.spec = case.spec.model_copy(update={"rollout": rollout})

    def asked(coordinator: Coordinator, round_index: int) -> list[str]:
        return [problem.problem_id for problem in coordinator._plan.round_work_unit(round_index, 0).problems]

    async def scene() -> None:
        first = case.coordinator()
        await first.learner_starting("group")
        for index in range(case.spec.learner.num_rounds):
            await first.next_batch(index, _weights_id(index + 1))
            assert await first.published(_trained(index), None)
        second = case.coordinator()
        assert [asked(second, index) for index in range(12)] == [asked(first, index) for index in range(12)]
        (case.spec.run_dir / "solve_rates.jsonl").unlink()
        third = case.coordinator()
        assert [asked(third, index) for index in range(12)] != [asked(first, index) for index in range(12)]

    _run(scene())
