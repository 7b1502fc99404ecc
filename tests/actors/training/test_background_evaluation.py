"""Background evaluations: when their results are known, and that a stop or a failure skips none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actors.messages import Next, WeightsId
from actors.spec import RunSpec
from actors.training.training import TrainingRun
from learner.parallel.consensus import Ranks
from tests.actors.local_run import LocalRun, Pulse, facts
from tests.actors.training.test_training import _files, _run, _spec, _ticking


class _Answering(LocalRun):
    """Gives another answer to the evaluation of one version."""

    def __init__(self, spec: RunSpec, version: int, answer: Next) -> None:
        super().__init__(spec)
        self._version, self._answer = version, answer

    def evaluate(self, weights_id: WeightsId, label: str, round_index: int, *, is_new: bool) -> Next:
        if weights_id.version == self._version:
            return self._answer
        return super().evaluate(weights_id, label, round_index, is_new=is_new)


def _course(run: LocalRun) -> list[str]:
    """Return the order in which rounds, evaluations and checkpoints are logged."""
    words = {
        "round": lambda event: f"round {event['round']}",
        "evaluation": lambda event: f"{event['label']} {event['round']}",
        "checkpoint": lambda event: Path(event["path"]).name,
    }
    named = [words[event["event"]](event) for event in run.events if event["event"] in words]
    return named[named.index("sft 0") + 1 :]


def _by_version(events: list[dict[str, Any]], kind: str, what: str) -> list[tuple[int, Any]]:
    """Return one field of a kind of event, once for each version."""
    return list({event["policy_version"]: event[what] for event in events if event["event"] == kind}.items())


def test_a_background_evaluation_is_collected_after_the_next_round_and_before_a_later_checkpoint(
    spec: RunSpec, tmp_path: Path
) -> None:
    run = _run(_spec(spec, tmp_path / "run"))
    expected = ["round 0", "rl-000001", "round 1", "round 1", "rl-000002", "round 2", "round 2", "rl-000003", "rl 3"]
    assert _course(run)[: len(expected)] == expected
    versions = [event["policy_version"] for event in run.events if event["event"] == "evaluation"]
    assert versions == [0, 1, 2, 3, 4, 5], "of the policy before the round that it runs during"


def test_a_stop_before_the_result_repeats_the_round_since_and_loses_no_evaluation(
    spec: RunSpec, tmp_path: Path
) -> None:
    whole, halved = (_spec(spec, tmp_path / name) for name in ("whole", "halved"))
    expected = _run(whole)
    first = _Answering(halved, 2, Next.STOP)
    TrainingRun(halved, first, Pulse(), Ranks(), _ticking(0.01)).run()
    assert first.events[-1] == {"event": "stopped", "phase": "rl", "round": 1, "step": None}
    assert [event["round"] for event in first.events if event["event"] == "round"] == [0, 1]
    assert "rl-000002" not in facts(halved)
    rest = _run(halved)
    assert rest.events[0]["checkpoint"] == "rl-000001"
    for kind, what in (("evaluation", "num_correct"), ("round", "rewards")):
        told, uninterrupted = (
            _by_version(events, kind, what) for events in (first.events + rest.events, expected.events)
        )
        assert told == uninterrupted
    for name in ("rl-000003", "control"):
        assert _files(whole, name) == _files(halved, name), name


def test_a_version_lost_during_its_evaluation_is_reported_and_the_run_continues(spec: RunSpec, tmp_path: Path) -> None:
    run = _spec(spec, tmp_path / "run")
    lost = _Answering(run, 2, Next.PUBLISH)
    TrainingRun(run, lost, Pulse(), Ranks(), _ticking(0.01)).run()
    (failure,) = [event["what"] for event in lost.events if event["event"] == "failure"]
    assert failure == "version 2 was lost with the weight store, and is not evaluated"
    versions = [event["policy_version"] for event in lost.events if event["event"] == "evaluation"]
    assert versions == [0, 1, 3, 4, 5]
