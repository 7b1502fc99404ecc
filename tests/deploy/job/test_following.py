"""RunFollower: events for the driver, wait reports, and the restart of a hung coordinator."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError

from deploy.interrupts import Terminated, terminated_by_sigterm
from deploy.job import following as module
from deploy.job.following import RunFollower, checkpoint_on_stop, following


class _Coordinator:
    """Fake coordinator. Its `mood` may be `silent` (calls time out) or `gone` (the actor is dead)."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.waits: tuple[str, ...] = ()
        self.mood = "well"
        self.num_learners = 1
        self.num_kills = 0
        self.on_stop: Any = lambda: None

    def __getattr__(self, name: str) -> Any:
        method = SimpleNamespace(remote=lambda *arguments: (name, arguments))
        method.options = lambda max_task_retries: method
        return method

    def get(self, asked: Any, timeout: float | None = None) -> Any:
        name, arguments = asked
        if self.mood == "gone":
            raise ActorDiedError
        if self.mood == "silent":
            raise GetTimeoutError
        if name == "events_since":
            return self.events[arguments[0] :]
        if name == "stop":
            self.on_stop()
            return bool(self.num_learners)
        return SimpleNamespace(waits=self.waits)


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> _Coordinator:
    made = _Coordinator()

    def kill(actor: Any, *, no_restart: bool) -> None:
        assert actor is made
        assert not no_restart
        made.num_kills += 1

    monkeypatch.setattr(ray, "get", made.get)
    monkeypatch.setattr(ray, "kill", kill)
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


class _Ended:
    """An event that is set after the last of its steps. Each wait runs one step."""

    def __init__(self, *steps: Any) -> None:
        self._steps = list(steps)

    def wait(self, timeout: float) -> bool:
        self._steps.pop(0)()
        return not self._steps


def test_events_arrive_once_and_in_order_even_after_a_silence(coordinator: _Coordinator, clock: list[float]) -> None:
    seen: list[dict[str, Any]] = []

    def now(mood: str, *names: str) -> Any:
        def do() -> None:
            coordinator.mood = mood
            coordinator.events += [{"event": name} for name in names]

        return do

    ended = _Ended(now("well", "a"), now("silent", "b"), now("silent"), now("well", "c"), now("well"))
    RunFollower(coordinator, 0, seen.append).follow(ended)  # type: ignore[arg-type]
    assert [event["event"] for event in seen] == ["a", "b", "c"]


def test_a_hung_coordinator_is_reported_and_replaced_and_its_successor_has_time_to_start(
    coordinator: _Coordinator, clock: list[float]
) -> None:
    said: list[str] = []

    def pass_by(seconds: float, mood: str = "silent") -> Any:
        def do() -> None:
            coordinator.mood = mood
            clock[0] += seconds

        return do

    steps = [pass_by(1, "well"), *[pass_by(1) for _ in range(300)]]
    RunFollower(coordinator, 0, lambda event: said.append(event["what"])).follow(_Ended(*steps))  # type: ignore[arg-type]
    assert said[:3] == [
        "the coordinator has been silent for 16 s",
        "the coordinator has been silent for 32 s",
        "the coordinator was silent for 46 s and is replaced",
    ]
    assert coordinator.num_kills == 1


def test_a_coordinator_that_died_has_time_to_restart(coordinator: _Coordinator, clock: list[float]) -> None:
    def pass_by(mood: str) -> Any:
        def do() -> None:
            coordinator.mood = mood
            clock[0] += 1

        return do

    moods = ["well", *["gone"] * 100, "silent", "well"]
    RunFollower(coordinator, 0, lambda _: None).follow(_Ended(*map(pass_by, moods)))  # type: ignore[arg-type]
    assert coordinator.num_kills == 0


def test_a_suspended_driver_replaces_no_coordinator(coordinator: _Coordinator, clock: list[float]) -> None:
    def stand_still() -> None:
        coordinator.mood = "silent"
        clock[0] += 1000

    RunFollower(coordinator, 0, lambda _: None).follow(_Ended(lambda: None, stand_still, lambda: None))  # type: ignore[arg-type]
    assert coordinator.num_kills == 0


def test_long_waits_are_reported(coordinator: _Coordinator, clock: list[float]) -> None:
    said: list[dict[str, Any]] = []
    coordinator.waits = ("sampler 1 silent for 45 s; work unit 12:1 waits for it",)

    def later() -> None:
        clock[0] += 6

    RunFollower(coordinator, 0, said.append).follow(_Ended(later, lambda: None))  # type: ignore[arg-type]
    assert said == [{"event": "waits", "what": coordinator.waits[0]}]


def _interrupted(coordinator: _Coordinator, fitted: Future[None], kind: type[BaseException]) -> list[str]:
    said: list[str] = []
    with pytest.raises(kind), checkpoint_on_stop(fitted, coordinator, lambda event: said.append(event["what"])):
        raise kind
    return said


def test_an_interrupt_waits_until_the_learner_has_stopped(coordinator: _Coordinator) -> None:
    fitted: Future[None] = Future()
    coordinator.on_stop = lambda: fitted.set_result(None)
    assert _interrupted(coordinator, fitted, Terminated) == [
        "stopping: the learner writes a checkpoint; a second signal stops it at once"
    ]


def test_the_wait_for_a_stopping_learner_is_bounded(coordinator: _Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_GRACE_S", 0.05)
    assert "wrote no checkpoint within" in _interrupted(coordinator, Future(), KeyboardInterrupt)[-1]


def test_the_bound_grows_with_the_size_of_a_checkpoint(
    coordinator: _Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted, waited = Future[None](), list[float]()

    def wait_until_done(_: Future[None], within_s: float) -> bool:
        waited.append(within_s)
        return False

    monkeypatch.setattr(module, "wait_until_done", wait_until_done)
    said: list[str] = []
    with (
        pytest.raises(KeyboardInterrupt),
        checkpoint_on_stop(fitted, coordinator, lambda event: said.append(event["what"]), 4_000_000_000),
    ):
        raise KeyboardInterrupt
    assert waited == [140.0]
    assert said[-1] == "the learner wrote no checkpoint within 140 s; --resume goes on from an earlier one"


def test_a_stop_request_without_an_answer_is_assumed_to_have_arrived(coordinator: _Coordinator) -> None:
    fitted: Future[None] = Future()
    fitted.set_result(None)
    coordinator.mood = "gone"
    assert len(_interrupted(coordinator, fitted, Terminated)) == 1


def test_a_stop_before_a_learner_is_up_does_not_wait(coordinator: _Coordinator) -> None:
    coordinator.num_learners = 0
    assert _interrupted(coordinator, Future(), KeyboardInterrupt) == []


def test_sigterm_raises_within_the_block_only() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), terminated_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_following_ends_with_the_block(coordinator: _Coordinator) -> None:
    seen: list[str] = []
    with following(coordinator, 0, lambda event: seen.append(event["event"])):
        coordinator.events.append({"event": "late"})
    assert seen == ["late"]
    assert "d1-events" not in {thread.name for thread in threading.enumerate()}
