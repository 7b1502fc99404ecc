"""Timeline of a run's actors over its newest rounds, as a Chrome trace: overlap and idle time.

    learner rank 0  | waiting |  training  | publish | waiting |  training  |
    sampler 0       | 3:0      |  4:0           |        | 5:0     |
    sampler 1         | 3:1    | unreachable  | 4:1 |
    grader 0                 |3:0| |3:1|      |4:0|

The file is a Chrome trace (chrome://tracing, ui.perfetto.dev): the "Trace Event Format", JSON object form.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from actors.coordination.reporting.status import work_unit_name
from actors.files.atomic_file import write_atomically

if TYPE_CHECKING:
    from actors.messages import WorkUnitKey

TIMELINE = "timeline.json"
LEARNER, COORDINATOR, STAGE, CHECKPOINTS = "learner rank 0", "coordinator", "stage", "checkpoints"
NUM_ROUNDS = 8
"""Rounds that are kept."""
_MAX_SPANS = 4000
_MICROSECONDS = 1e6
_STAGES_OF_STEPS = ("sft", "control")


class SpanKind(StrEnum):
    """State of an actor in a span."""

    WORK = "work"
    """It works."""
    WAIT = "wait"
    """It waits for other actors."""
    UNREACHABLE = "unreachable"
    """It is unreachable: it restarts, or is still in a call that timed out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Time span of one activity of an actor."""

    track: str
    """The actor: `sampler 1`, `learner rank 0`."""
    name: str
    """Its activity: `work unit 3:1`, `round 3: training`."""
    kind: SpanKind
    """State of the actor."""
    began: float
    """Unix time. Two spans of a track do not overlap."""
    ended: float
    """Unix time."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further attributes: `round`, `is_done`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkSpan:
    """Time span in which an actor of a pool had a work unit, or was unreachable."""

    actor: str
    """Its name: `sampler 1`."""
    key: WorkUnitKey | None
    """The work unit; None where the actor was unreachable."""
    began: float
    """By `time.monotonic`."""
    ended: float
    """By the same clock."""
    is_done: bool
    """Whether it answered; else the attempt failed or timed out, or the actor was unreachable."""


class Timeline:
    """Spans of the newest rounds. Times that are passed in are those of its clock, `time.monotonic`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        """Begin without spans. The clocks are compared once: a later jump of the wall clock shifts nothing."""
        self._offset = wall() - clock()
        self._clock = clock
        self._spans: deque[Span] = deque(maxlen=_MAX_SPANS)
        self._ends: dict[str, float] = {}
        self._rounds: deque[float] = deque(maxlen=NUM_ROUNDS)
        self._has_changed = False

    def add(self, track: str, name: str, kind: SpanKind, began: float, ended: float | None = None, **args: Any) -> None:
        """Add a span, which ends now if no end is given. Spans of a track do not overlap, so its beginning is clipped
        to the end of the one before it."""
        until = self._unix(ended)
        self._append(Span(track=track, name=name, kind=kind, began=began + self._offset, ended=until, args=args))

    def add_since(self, track: str, name: str, kind: SpanKind, began: float) -> None:
        """Add a span that ends now, and whose beginning another process recorded, in Unix time."""
        self._append(Span(track=track, name=name, kind=kind, began=began, ended=self._unix(None)))

    def add_work_spans(self, spans: Iterable[WorkSpan]) -> None:
        """Add the time spans of the pools' actors."""
        for span in spans:
            if span.key is None:
                self.add(span.actor, "unreachable", SpanKind.UNREACHABLE, span.began, span.ended)
                continue
            facts = {"round": span.key.round, "index": span.key.index, "is_done": span.is_done}
            self.add(span.actor, work_unit_name(span.key), SpanKind.WORK, span.began, span.ended, **facts)

    def add_round(self, round_index: int, values: Mapping[str, Any]) -> None:
        """Add a round that the learner has just published. `values` has `sampling_s`, `training_s` and `publish_s`.

        These are durations, because the learner may be on another machine with another clock.
        """
        published = self._clock()
        trained = published - values["publish_s"]
        sampled = trained - values["training_s"]
        began = sampled - values["sampling_s"]
        self._rounds.append(began + self._offset)
        for name, kind, since, until in (
            ("waiting", SpanKind.WAIT, began, sampled),
            ("training", SpanKind.WORK, sampled, trained),
            ("publish", SpanKind.WORK, trained, published),
        ):
            self.add(LEARNER, f"round {round_index}: {name}", kind, since, until, round=round_index)

    def add_event(self, event: str, values: Mapping[str, Any]) -> None:
        """Add the span of a new event of the run log, if it is one of something that has just ended."""
        if event == "checkpoint":
            name = f"checkpoint {Path(values['path']).name}"
            # One that is written in the background overlaps with the learner's other spans.
            self.add(
                CHECKPOINTS if values.get("beside") else LEARNER, name, SpanKind.WORK, self._clock() - values["seconds"]
            )
        elif event == "phase_end" and values["phase"] in _STAGES_OF_STEPS:
            name = f"{values['phase']}: {values['num_steps']} steps"
            self.add(STAGE, name, SpanKind.WORK, self._clock() - values["seconds"])

    def spans(self) -> list[Span]:
        """Return the spans that ended after the beginning of the oldest round that is kept."""
        since = self._rounds[0] if len(self._rounds) == NUM_ROUNDS else 0.0
        return [span for span in self._spans if span.ended > since]

    def take_changed(self) -> list[Span] | None:
        """Return the spans of the newest rounds; None if they have not changed since the last call."""
        if not self._has_changed:
            return None
        self._has_changed = False
        kept = self.spans()
        self._spans = deque(kept, maxlen=_MAX_SPANS)
        return kept

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the trace that an earlier process wrote, to continue it; empty if there is none."""
        timeline = cls()
        for span in read_trace(directory / TIMELINE):
            timeline._append(span)
            if _is_wait_for_a_round(span):
                timeline._rounds.append(span.began)
        return timeline

    def _unix(self, at: float | None) -> float:
        return self._offset + (self._clock() if at is None else at)

    def _append(self, span: Span) -> None:
        span = replace(span, began=max(span.began, self._ends.get(span.track, 0.0)))
        if span.began < span.ended:
            self._ends[span.track] = span.ended
            self._spans.append(span)
            self._has_changed = True


def write_trace(directory: Path, spans: Sequence[Span]) -> None:
    """Write spans into a run directory, atomically. On a full disk the older file stays."""
    write_atomically(directory / TIMELINE, json.dumps(trace_of(spans)))


def trace_of(spans: Sequence[Span]) -> dict[str, Any]:
    """Make a Chrome trace with a thread for each track. Times are in microseconds since 1970."""
    tracks = sorted({span.track for span in spans}, key=_order)
    tids = {track: tid for tid, track in enumerate(tracks, start=1)}
    names = [
        {"ph": "M", "pid": 1, "tid": tid, "name": what, "args": args}
        for track, tid in tids.items()
        for what, args in (("thread_name", {"name": track}), ("thread_sort_index", {"sort_index": tid}))
    ]
    events = [
        {
            "ph": "X",
            "pid": 1,
            "tid": tids[span.track],
            "name": span.name,
            "cat": str(span.kind),
            "ts": (began := round(span.began * _MICROSECONDS)),
            "dur": round(span.ended * _MICROSECONDS) - began,
            "args": dict(span.args),
        }
        for span in sorted(spans, key=lambda span: span.began)
    ]
    return {"displayTimeUnit": "ms", "traceEvents": names + events}


def read_trace(path: Path) -> list[Span]:
    """Read the spans of a trace that `trace_of` made; none if the file is missing or cannot be read."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        return [
            Span(
                track=tracks[event["tid"]],
                name=event["name"],
                kind=SpanKind(event["cat"]),
                began=event["ts"] / _MICROSECONDS,
                ended=(event["ts"] + event["dur"]) / _MICROSECONDS,
                args=event["args"],
            )
            for event in events
            if event["ph"] == "X"
        ]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def num_rounds(spans: Iterable[Span]) -> int:
    """Count the rounds of a trace."""
    return sum(_is_wait_for_a_round(span) for span in spans)


def idle_shares(spans: Sequence[Span]) -> dict[str, float]:
    """Return the share of the rounds' time that each actor did not work, 0 to 1.

    The rounds' time begins with the learner's wait for the first of them, and ends with the publication of the last.
    """
    rounds = [span for span in spans if span.track == LEARNER and "round" in span.args]
    if not rounds:
        return {}
    began, ended = min(span.began for span in rounds), max(span.ended for span in rounds)
    return {
        track: 1 - sum(_within(span, began, ended) for span in _work_spans(spans, track)) / (ended - began)
        for track in sorted({span.track for span in spans} - {COORDINATOR, STAGE, CHECKPOINTS}, key=_order)
    }


def _work_spans(spans: Iterable[Span], track: str) -> Iterator[Span]:
    return (span for span in spans if span.track == track and span.kind is SpanKind.WORK)


def _within(span: Span, began: float, ended: float) -> float:
    return max(0.0, min(span.ended, ended) - max(span.began, began))


def _is_wait_for_a_round(span: Span) -> bool:
    return span.track == LEARNER and span.kind is SpanKind.WAIT and "round" in span.args


def _order(track: str) -> tuple[int, str, int]:
    """Sort key of a track: the learner first, then samplers and graders, each kind by number."""
    kind, _, number = track.rpartition(" ")
    kinds = ("learner rank", "sampler", "grader")
    place = kinds.index(kind) if kind in kinds else len(kinds)
    return place, kind, int(number) if number.isdigit() else 0
