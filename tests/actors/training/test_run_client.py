"""Calls of a learner's rank 0 to the run's coordinator, and their order."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from actors.coordination.reporting.status import SILENT_S
from actors.messages import Next, TrainedRound, WeightsId, WorkUnitKey
from actors.spec import Phase
from actors.training import run_client
from actors.training.run_client import RunClient, heartbeat_interval_s

SECOND = WeightsId(version=2, digest="2")
TRAINED = TrainedRound(round=0, weights_id=SECOND, values={"loss": 1.0})


class _Coordinator:
    """Records the calls, and those whose answer is awaited."""

    def __init__(self, **answers: Any) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.heard: list[str] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Callable[[], Any]:
            self.asked.append((name, *arguments))
            answers = self._answers.get(name)
            answer = answers.pop(0) if answers else (Next.CONTINUE, []) if name in ("next_batch", "evaluate") else True

            def waited_for() -> Any:
                self.heard.append(name)
                return answer

            return waited_for

        return type("Method", (), {"remote": staticmethod(remote)})


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RunClient, _Coordinator]]:
    monkeypatch.setattr(run_client.ray, "get", lambda asked, timeout=None: asked() if callable(asked) else asked)

    def make(**answers: Any) -> tuple[RunClient, _Coordinator]:
        coordinator = _Coordinator(**answers)
        return RunClient(coordinator, None), coordinator

    return make


def _publish(client: RunClient) -> None:
    client.announce(SECOND, Phase.RL, 1)
    key = WorkUnitKey(round=0, index=0)
    scored: Any = SimpleNamespace(work_unit=SimpleNamespace(key=key), summary="summary", completions="tensors")
    client.published(0, SECOND, {"loss": 1.0}, [scored])


def test_a_round_is_reported_with_the_request_for_the_next(client: Callable[..., Any]) -> None:
    run, coordinator = client()
    _publish(run)
    assert coordinator.heard == [], "the call does not wait for the registry"
    assert run.next_batch(1, SECOND) == (Next.CONTINUE, [])
    assert coordinator.asked == [("announce", SECOND, Phase.RL, 1), ("next_batch", 1, SECOND, TRAINED, "")]
    assert coordinator.heard == ["announce", "next_batch"]
    run.next_batch(1, SECOND)
    run.report_round()
    assert coordinator.asked[2:] == [("next_batch", 1, SECOND, None, "")], "once"


@pytest.mark.parametrize("name", ["record", "evaluate", "report_round"])
def test_a_round_is_reported_before_any_other_call(client: Callable[..., Any], name: str) -> None:
    run, coordinator = client()
    _publish(run)
    if name == "record":
        run.record("checkpoint", {})
    elif name == "evaluate":
        run.evaluate(SECOND, "round", 1, is_new=True)
    else:
        run.report_round()
    assert coordinator.asked[1] == ("published", TRAINED, None)
    assert [asked[0] for asked in coordinator.asked[2:]] == ([] if name == "report_round" else [name])
    assert coordinator.heard[:2] == ["announce", "published"]


def test_a_coordinator_that_does_not_know_the_round_receives_its_summaries(client: Callable[..., Any]) -> None:
    run, coordinator = client(next_batch=[(Next.REPORT, []), (Next.CONTINUE, [])], published=[False, True])
    _publish(run)
    assert run.next_batch(1, SECOND) == (Next.CONTINUE, [])
    assert coordinator.asked[1:] == [
        ("next_batch", 1, SECOND, TRAINED, ""),
        ("published", TRAINED, None),
        ("published", TRAINED, {WorkUnitKey(round=0, index=0): "summary"}),
        ("next_batch", 1, SECOND, None, ""),
    ]


def test_a_failed_announcement_is_raised_by_the_next_call(client: Callable[..., Any]) -> None:
    run, coordinator = client()

    def fail(*_: Any) -> Callable[[], Any]:
        def waited_for() -> Any:
            raise TimeoutError("no answer")

        return waited_for

    coordinator.announce = type("Method", (), {"remote": staticmethod(fail)})
    _publish(run)
    with pytest.raises(TimeoutError, match="no answer"):
        run.next_batch(1, SECOND)


@pytest.mark.parametrize("num_ranks", [1, 64, 1024])
def test_heartbeats_neither_overload_the_coordinator_nor_look_like_silence(num_ranks: int) -> None:
    interval_s = heartbeat_interval_s(num_ranks)
    assert num_ranks / interval_s <= 200
    assert 1.0 <= interval_s <= SILENT_S / 2
