"""Announcer: reports everything to the registry in order, with retries and without blocking the run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import actors.registry.announcer as module
from actors.event_history import EventHistory
from actors.messages import WeightsId
from actors.registry.announcer import Announcer
from actors.run_log import VALIDATION, RunLog, read_events
from actors.spec import Phase


class _Registry:
    """A fake registry that answers, is unreachable, or hangs."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.num_tries = 0
        self.is_away = self.is_new = False
        self.refuses: Any = None
        self.refusal: Exception = ConnectionError("the registry at nowhere cannot be used: malformed")
        self.goes_away_after: int | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()

    def ping(self) -> None:
        if self.is_away:
            raise ConnectionError("the registry at nowhere cannot be used")

    def _hear(self, *fact: Any) -> None:
        self.num_tries += 1
        assert self.may_answer.wait(60)
        self.ping()
        if fact[:2] == self.refuses:
            raise self.refusal
        self.told.append(fact)
        if len(self.told) == self.goes_away_after:
            self.is_away = True

    def announce(self, policy: Any, began_at: float | None) -> bool:
        self._hear("version", policy.version)
        is_new, self.is_new = self.is_new, False
        return not is_new

    def add_checkpoint(self, version: int, directory: str) -> None:
        self._hear("checkpoint", version, directory)

    def score(self, version: int, num_correct: int, num_problems: int) -> None:
        self._hear("score", version, num_correct, num_problems)

    def choose_best(self, version: int) -> None:
        self._hear("best", version)

    def restore(self, versions: Any, newest: Any, began: Any, best: Any) -> int:
        self._hear("restored", [policy.version for policy in versions])
        return 0


class _Case:
    """A run's log, its registry, and its announcers."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.registry = run_dir, _Registry()
        self.history = EventHistory()
        self.log = RunLog(run_dir, on_event=self.history.add)

    def announcer(self, *, lacks_history: bool = False) -> Announcer:
        registry: Any = self.registry
        announcer = Announcer(registry, self.log, self.history, self.run_dir, "store")
        announcer._lacks_history = lacks_history
        return announcer

    def failures(self) -> list[str]:
        self.log.write_out()
        return [event["what"] for event in read_events(self.run_dir) if event["event"] == "failure"]


@pytest.fixture
def case(tmp_path: Path) -> Iterator[_Case]:
    case = _Case(tmp_path)
    yield case
    case.log.close()


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


@pytest.fixture
def is_hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the announcer's timeout."""
    monkeypatch.setattr(module, "_DELIVERY_TIMEOUT_S", 0.01)


async def _announce(announcer: Announcer, version: int) -> None:
    await announcer.announce(WeightsId(version=version, digest=str(version)), Phase.RL, version)


async def _tell_of(announcer: Announcer, version: int) -> None:
    await _announce(announcer, version)
    announcer.checkpoint(version, Path("rl") / str(version))
    announcer.evaluated(version, "rl", version, 9)


def _facts(*versions: int) -> list[Any]:
    of_version = [
        (("version", version), ("checkpoint", version, f"rl/{version}"), ("score", version, version, 9))
        for version in versions
    ]
    return [fact for facts in of_version for fact in facts]


def test_facts_are_announced_in_order(case: _Case) -> None:
    async def scene() -> None:
        announcer = case.announcer()
        await _tell_of(announcer, 1)
        await _tell_of(announcer, 2)
        await announcer.flush()
        assert case.registry.told == _facts(1, 2)
        assert case.failures() == []

    _run(scene())


def test_the_best_version_follows_validation_scores(case: _Case) -> None:
    def validated(version: int, num_correct: int) -> None:
        facts = {"label": VALIDATION, "policy_version": version, "num_correct": num_correct, "num_problems": 9}
        case.log.append("evaluation", round=version, **facts)

    async def scene() -> None:
        announcer = case.announcer()
        for version, num_correct in ((1, 5), (2, 3)):
            validated(version, num_correct)
            announcer.evaluated(version, VALIDATION, num_correct, 9)
        await announcer.flush()
        assert case.registry.told == [("score", 1, 5, 9), ("best", 1), ("score", 2, 3, 9), ("best", 1)]

    _run(scene())


@pytest.mark.usefixtures("is_hurried")
def test_announcing_does_not_block_on_a_silent_registry(case: _Case) -> None:
    async def scene() -> None:
        announcer = case.announcer()
        case.registry.may_answer.clear()
        await _tell_of(announcer, 1)
        await _tell_of(announcer, 2)
        assert case.registry.told == []
        case.registry.may_answer.set()
        await announcer.flush()
        assert case.registry.told == _facts(1, 2)

    _run(scene())


def test_a_publisher_waits_for_a_responsive_registry(case: _Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DELIVERY_TIMEOUT_S", 60)

    async def scene() -> None:
        await _announce(case.announcer(), 1)
        assert case.registry.told == [("version", 1)]

    _run(scene())


def test_an_outage_is_reported_once_and_loses_nothing(case: _Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DELIVERY_TIMEOUT_S", 60)

    async def scene() -> None:
        announcer = case.announcer()
        await _announce(announcer, 1)
        case.registry.is_away = True
        for version in (2, 3):
            await _tell_of(announcer, version)
        # Every new fact triggers a retry, unless one is in progress.
        assert announcer._sending is not None
        await announcer._sending
        assert case.registry.told == [("version", 1)]
        case.registry.is_away = False
        await _announce(announcer, 4)
        await announcer.flush()
        assert case.registry.told == [("version", 1), *_facts(2, 3), ("version", 4)]
        assert case.failures() == ["the registry at nowhere cannot be used"]

    _run(scene())


def test_announce_returns_whether_the_registry_was_told(case: _Case, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        announcer, weights_id = case.announcer(), WeightsId(version=1, digest="1")
        assert await announcer.announce(weights_id, Phase.RL, 1)
        case.registry.is_away = True
        assert not await announcer.announce(weights_id, Phase.RL, 1)
        assert not await announcer.announce(weights_id, Phase.RL, 1), "in an outage nobody waits"
        case.registry.is_away = False
        await announcer.flush()
        monkeypatch.setattr(module, "_DELIVERY_TIMEOUT_S", 0.01)
        case.registry.may_answer.clear()
        assert not await announcer.announce(weights_id, Phase.RL, 1)
        case.registry.may_answer.set()
        await announcer.flush()

    _run(scene())


@pytest.mark.usefixtures("is_hurried")
def test_retries_are_not_made_for_each_missed_fact(case: _Case) -> None:
    async def scene() -> None:
        announcer = case.announcer()
        case.registry.is_away = True
        case.registry.may_answer.clear()
        for version in range(1, 11):
            await _tell_of(announcer, version)
        case.registry.may_answer.set()
        await announcer.flush()
        assert case.registry.num_tries == 2  # And once more at the end.
        left = "the registry is still away, and was not told all that the run directory has"
        assert case.failures() == ["the registry at nowhere cannot be used", left]

    _run(scene())


@pytest.mark.parametrize("goes_away_between", [False, True])
def test_an_empty_registry_is_rebuilt_from_the_run_directory(case: _Case, goes_away_between: bool) -> None:
    async def scene() -> None:
        announcer = case.announcer()
        case.log.append("round", round=0, policy_version=2)
        case.registry.is_new = True
        case.registry.goes_away_after = 1 if goes_away_between else None
        await _announce(announcer, 3)
        assert announcer._sending is not None
        await announcer._sending
        case.registry.is_away = False
        await _announce(announcer, 4)
        await announcer.flush()
        again = [("version", 3)] * goes_away_between
        assert case.registry.told == [("version", 3), *again, ("restored", [2]), ("version", 4)]

    _run(scene())


def test_retry_announces_without_new_facts(case: _Case) -> None:
    async def scene() -> None:
        announcer = case.announcer()
        case.registry.is_away = True
        await _tell_of(announcer, 1)
        assert announcer._sending is not None
        await announcer._sending
        case.registry.is_away = False
        announcer.retry()
        await announcer._sending
        assert case.registry.told == _facts(1)
        num_tries = case.registry.num_tries
        announcer.retry()
        await announcer._sending
        assert case.registry.num_tries == num_tries, "there is nothing to tell"

    _run(scene())


@pytest.mark.parametrize("refusal", [None, KeyError("version")])
def test_a_refused_fact_is_recorded_and_later_ones_are_announced(case: _Case, refusal: Exception | None) -> None:
    async def scene() -> None:
        announcer = case.announcer()
        case.registry.refuses = "checkpoint", 1
        case.registry.refusal = refusal or case.registry.refusal
        await _tell_of(announcer, 1)
        await _announce(announcer, 2)
        await announcer.flush()
        version, _, score = _facts(1)
        # The run directory has what this loses.
        filled: list[Any] = [] if refusal else [("restored", [])]
        assert case.registry.told == [version, score, ("version", 2), *filled]
        said = "KeyError: 'version'" if refusal else "the registry at nowhere cannot be used: malformed"
        assert case.failures() == [said]

    _run(scene())


@pytest.mark.parametrize("announces", [True, False])
def test_facts_of_a_dead_coordinator_are_restored_once(case: _Case, announces: bool) -> None:
    async def scene() -> None:
        case.log.append("round", round=0, policy_version=2)
        announcer = case.announcer(lacks_history=True)
        for version in (3, 4) if announces else ():
            await _announce(announcer, version)
        await announcer.flush()
        await announcer.flush()
        filled = ("restored", [2])
        assert case.registry.told == ([("version", 3), filled, ("version", 4)] if announces else [filled])

    _run(scene())


def test_a_new_announcer_assumes_missing_history(case: _Case) -> None:
    registry: Any = case.registry
    assert Announcer(registry, case.log, case.history, case.run_dir, "store")._lacks_history
