"""The timeline without Ray: recorded spans, the written trace, and idle shares."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from actors.coordination.reporting.timeline import (
    CHECKPOINTS,
    COORDINATOR,
    LEARNER,
    NUM_ROUNDS,
    STAGE,
    TIMELINE,
    SpanKind,
    Timeline,
    WorkSpan,
    idle_shares,
    num_rounds,
    read_trace,
    trace_of,
    write_trace,
)
from actors.messages import WorkUnitKey

UNIX = 1_000_000.0
ROUND = {"sampling_s": 2.0, "training_s": 5.0, "publish_s": 1.0}


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timeline(clock: Clock) -> Timeline:
    """A timeline whose clock reads 50 s at the Unix time `UNIX`."""
    return Timeline(clock, lambda: UNIX)


def _work(actor: str, round_index: int, began: float, ended: float) -> WorkSpan:
    return WorkSpan(actor=actor, key=WorkUnitKey(round=round_index, index=1), began=began, ended=ended, is_done=True)


def _times(timeline: Timeline, track: str) -> list[tuple[str, float, float]]:
    return [(span.name, span.began - UNIX, span.ended - UNIX) for span in timeline.spans() if span.track == track]


def test_a_round_is_three_spans_that_end_when_it_is_published(timeline: Timeline, clock: Clock) -> None:
    clock.now += 10
    timeline.add_round(3, ROUND)
    assert _times(timeline, LEARNER) == [
        ("round 3: waiting", 2.0, 4.0),
        ("round 3: training", 4.0, 9.0),
        ("round 3: publish", 9.0, 10.0),
    ]
    assert [span.kind for span in timeline.spans()] == [SpanKind.WAIT, SpanKind.WORK, SpanKind.WORK]
    assert {span.args["round"] for span in timeline.spans()} == {3}


def test_work_units_evaluations_and_restarts_are_distinguished(timeline: Timeline) -> None:
    away = WorkSpan(actor="sampler 1", key=None, began=53.0, ended=55.0, is_done=False)
    timeline.add_work_spans([_work("sampler 1", 4, 51.0, 53.0), away, _work("grader 0", -1, 51.0, 52.0)])
    assert _times(timeline, "sampler 1") == [("work unit 4:1", 1.0, 3.0), ("unreachable", 3.0, 5.0)]
    assert _times(timeline, "grader 0") == [("evaluation work unit 1", 1.0, 2.0)]
    assert [span.kind for span in timeline.spans()] == [SpanKind.WORK, SpanKind.UNREACHABLE, SpanKind.WORK]


def test_spans_of_a_track_do_not_overlap(timeline: Timeline, clock: Clock) -> None:
    clock.now += 10
    timeline.add_round(0, ROUND)
    clock.now += 7.5
    # The last round's publication was reported half a second after this round's wait began.
    timeline.add_round(1, ROUND)
    timeline.add(LEARNER, "nothing", SpanKind.WORK, clock.now - 3)
    spans = timeline.spans()
    assert all(before.ended <= after.began for before, after in pairwise(spans))
    assert len(spans) == 6


def test_only_spans_of_the_newest_rounds_are_kept(timeline: Timeline, clock: Clock) -> None:
    for index in range(NUM_ROUNDS + 3):
        timeline.add_work_spans([_work("sampler 0", index + 1, clock.now + 1, clock.now + 7)])
        clock.now += 8
        timeline.add_round(index, ROUND)
    spans = timeline.spans()
    assert [span.args["round"] for span in spans if span.name.endswith("training")] == list(range(3, NUM_ROUNDS + 3))
    assert [span.args["round"] for span in spans if span.track == "sampler 0"] == list(range(4, NUM_ROUNDS + 4))
    assert num_rounds(spans) == NUM_ROUNDS


def test_without_a_round_the_number_of_spans_is_bounded(timeline: Timeline) -> None:
    timeline.add_work_spans(_work("sampler 0", -1, 51.0 + index, 52.0 + index) for index in range(5000))
    assert len(timeline.spans()) == 4000
    assert timeline.spans()[-1].ended == UNIX + 5001


def test_the_file_is_a_chrome_trace_with_a_named_thread_for_each_actor(
    timeline: Timeline, clock: Clock, tmp_path: Path
) -> None:
    timeline.add_work_spans([_work("sampler 10", 0, 50.0, 51.0), _work("grader 0", 0, 51.0, 52.0)])
    timeline.add_work_spans([_work("sampler 2", 0, 50.25, 51.5)])
    clock.now += 10
    timeline.add_round(0, ROUND)
    write_trace(tmp_path, timeline.spans())
    trace = json.loads((tmp_path / TIMELINE).read_text())
    names = [event for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert [event["args"]["name"] for event in names] == [LEARNER, "sampler 2", "sampler 10", "grader 0"]
    (work_unit,) = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == names[1]["tid"]]
    assert work_unit == {
        "ph": "X",
        "pid": 1,
        "tid": names[1]["tid"],
        "name": "work unit 0:1",
        "cat": "work",
        "ts": 1_000_000_250_000,
        "dur": 1_250_000,
        "args": {"round": 0, "index": 1, "is_done": True},
    }
    assert trace == trace_of(read_trace(tmp_path / TIMELINE))


def test_the_timeline_is_written_only_if_it_changed(timeline: Timeline) -> None:
    assert timeline.take_changed() is None
    timeline.add_work_spans([_work("sampler 0", 0, 50.0, 51.0)])
    assert timeline.take_changed() == timeline.spans()
    assert timeline.take_changed() is None


def test_a_restarted_coordinator_continues_the_written_timeline(
    timeline: Timeline, clock: Clock, tmp_path: Path
) -> None:
    for index in range(NUM_ROUNDS):
        clock.now += 8
        timeline.add_round(index, ROUND)
    write_trace(tmp_path, timeline.spans())
    again = Timeline.read(tmp_path)
    assert again.spans() == read_trace(tmp_path / TIMELINE)
    again.add_since(COORDINATOR, "unreachable", SpanKind.UNREACHABLE, UNIX + 64)
    again.add_round(NUM_ROUNDS, ROUND)
    kept = [span.args["round"] for span in again.spans() if span.name.endswith("training")]
    assert kept == list(range(1, NUM_ROUNDS + 1))
    assert _times(again, COORDINATOR)[0][:2] == ("unreachable", 64.0)


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"traceEvents": [1]}', '{"traceEvents": [{"name": "x"}]}'])
def test_a_trace_that_cannot_be_read_is_an_empty_one(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / TIMELINE).write_text(text)
    assert Timeline.read(tmp_path).spans() == []


def test_idle_shares_are_the_time_of_the_rounds_without_work(timeline: Timeline, clock: Clock) -> None:
    assert idle_shares(timeline.spans()) == {}
    # The rounds last from 2 s to 10 s. Earlier and later work is excluded, and downtime is not work.
    timeline.add_work_spans([_work("sampler 0", 0, 50.0, 54.0), _work("sampler 0", 0, 58.0, 70.0)])
    timeline.add_work_spans([WorkSpan(actor="sampler 1", key=None, began=52.0, ended=60.0, is_done=False)])
    clock.now += 10
    timeline.add_round(0, ROUND)
    timeline.add(STAGE, "control: 3 steps", SpanKind.WORK, 50.0)
    assert idle_shares(timeline.spans()) == pytest.approx({LEARNER: 0.25, "sampler 0": 0.5, "sampler 1": 1.0})


def test_checkpoints_and_stages_are_taken_from_the_run_log(timeline: Timeline, clock: Clock) -> None:
    clock.now += 10
    timeline.add_event("checkpoint", {"path": "checkpoints/rl-000003", "seconds": 2.0})
    timeline.add_event("phase_end", {"phase": "sft", "seconds": 4.0, "num_steps": 5})
    timeline.add_event("phase_end", {"phase": "rl", "seconds": 4.0, "num_steps": 5})
    timeline.add_event("sft", {"step": 3})
    assert _times(timeline, LEARNER) == [("checkpoint rl-000003", 8.0, 10.0)]
    assert _times(timeline, STAGE) == [("sft: 5 steps", 6.0, 10.0)]


def test_a_background_checkpoint_does_not_clip_the_learners_spans(timeline: Timeline, clock: Clock) -> None:
    clock.now += 8
    timeline.add_event("checkpoint", {"path": "checkpoints/rl-000003", "seconds": 6.0, "beside": True})
    clock.now += 2
    timeline.add_round(0, ROUND)
    assert _times(timeline, CHECKPOINTS) == [("checkpoint rl-000003", 2.0, 8.0)]
    assert sum(until - since for _, since, until in _times(timeline, LEARNER)) == sum(ROUND.values())
    assert CHECKPOINTS not in idle_shares(timeline.spans())
