"""A run directory as the page reads it. Its files are written by the run while they are read."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from actors.checkpoints.selection import servable_checkpoints
from actors.registry.records import PolicyVersion
from actors.run_log import CHECKPOINTS, METRICS, RECIPE, SAMPLES, Event
from deploy.recipe.yaml_text import parse_yaml
from deploy.runs.history import Evaluation
from deploy.runs.live_history import Cursor, HistoryPart, LiveHistory
from deploy.service.api.replies import (
    DrawnEvaluation,
    DrawnRound,
    DrawnStep,
    RunEvents,
    RunHistoryReply,
    RunReply,
    Samples,
)
from deploy.service.checkpoints import Checkpoints

MAX_EVENTS = 1000
MAX_SAMPLES = 200
_MAX_LINE_BYTES = 4 * 1024 * 1024
_TTL_S = 5.0


class RunView:
    """What one run has written so far."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._metrics, self._samples = _GrowingFile(directory / METRICS), _GrowingFile(directory / SAMPLES)
        self._checkpoints = Checkpoints(directory)
        self._lock, self._history_lock = threading.Lock(), threading.Lock()
        self._live, self._num_beginnings = LiveHistory(), 0
        self._versions: tuple[int, ...] = ()
        self._looked_at = -math.inf

    def summary(self) -> RunReply:
        """Its name, when it began, and where it is."""
        with self._history_lock:
            history = self._caught_up().history
            began_at, phase = history.began_at, "done" if history.is_finished else history.phase
        recipe = parse_yaml((self._directory / RECIPE).read_text(encoding="utf-8"))
        return RunReply(
            name=self._directory.name,
            began_at=began_at,
            phase=phase,
            num_rounds=(recipe.get("learner") or {}).get("num_rounds"),
            recipe=recipe,
        )

    def events(self, after: int) -> RunEvents:
        """The events after the first `after`, a page of them at most."""
        events = self._metrics.objects(after, MAX_EVENTS)
        return RunEvents(events=events, next=after + len(events))

    def history(self, seen: Cursor) -> RunHistoryReply:
        """What the run has come to; of its rounds, steps and evaluations those after what was seen."""
        with self._history_lock:
            live = self._caught_up()
            return history_body(live, live.since(seen))

    def samples(self, limit: int) -> Samples:
        """The newest samples, the newest last."""
        return Samples(samples=self._samples.last(limit))

    def _caught_up(self) -> LiveHistory:
        """With what was appended since: of a long run each poll would otherwise read all of it."""
        while True:
            events = self._metrics.objects(self._live.num_events, MAX_EVENTS)
            if self._metrics.num_beginnings != self._num_beginnings:
                self._live, self._num_beginnings = LiveHistory(), self._metrics.num_beginnings
            elif not events:
                return self._live
            else:
                self._live.add(events)

    def versions(self) -> tuple[int, ...]:
        """The policy versions that have checkpoints, as it was seconds ago."""
        with self._lock:
            # A long run has hundreds of them, and each has a file that is read.
            if time.monotonic() - self._looked_at > _TTL_S:
                found = servable_checkpoints(self._directory / CHECKPOINTS)
                self._versions = tuple(position.policy_version for position, _ in found)
                self._looked_at = time.monotonic()
            return self._versions

    def checkpoint(self, version: int) -> PolicyVersion | None:
        """The checkpoint of a version, as it was seconds ago; None where there is none."""
        return self._checkpoints.locate(version) if version in self.versions() else None


class _GrowingFile:
    """A file of lines that is read again and again while it grows. Threads may call it at the same time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._end = 0
        self.num_beginnings = 0
        """How often another run's file under the same name was found."""

    def objects(self, after: int, most: int) -> list[dict[str, Any]]:
        """The JSON objects after the first `after`, at most so many."""
        return self._read(slice(after, after + most))

    def last(self, most: int) -> list[dict[str, Any]]:
        """The last JSON objects, at most so many."""
        return self._read(slice(-most, None))

    def _read(self, which: slice) -> list[dict[str, Any]]:
        if not self._path.is_file():
            return []
        with self._lock, self._path.open("rb") as file:
            self._catch_up(file)
            wanted = self._starts[which]
            if not wanted:
                return []
            file.seek(wanted[0])
            return [value for _, value in islice(_lines(file), len(wanted))]

    def _catch_up(self, file: BinaryIO) -> None:
        """Look at what was appended: of a long run each poll would otherwise read all of it."""
        if os.fstat(file.fileno()).st_size < self._end:
            self._starts, self._end = [], 0
            self.num_beginnings += 1
        file.seek(self._end)
        for start, _ in _lines(file):
            self._starts.append(start)
        self._end = file.tell()


def history_body(live: LiveHistory, part: HistoryPart) -> RunHistoryReply:
    """The answer of `GET /v1/run/history`."""
    history = live.history
    return RunHistoryReply(
        name=history.name,
        phase=history.phase,
        is_finished=history.is_finished,
        seconds=history.seconds,
        num_planned_rounds=history.planned.get("rl"),
        num_failures=history.num_failures,
        num_unreadable=live.num_unreadable,
        newest_round=history.newest_round,
        is_whole=part.is_from_start,
        rounds=[_drawn_round(event) for event in part.rounds],
        steps=[DrawnStep(step=event["step"], loss=event.get("loss")) for event in part.steps],
        evaluations=[_drawn_evaluation(item) for item in part.evaluations],
        next=str(part.end),
    )


def _drawn_round(event: Event) -> DrawnRound:
    values = {key: event.get(key) for key in DrawnRound.model_fields}
    return DrawnRound.model_validate(
        {key: value if isinstance(value, int | float) else None for key, value in values.items()}
    )


def _drawn_evaluation(item: Evaluation) -> DrawnEvaluation:
    low, high = item.score.interval
    return DrawnEvaluation(
        line=item.line,
        round=item.round,
        drawn_s=item.drawn_s,
        num_correct=item.score.num_correct,
        num_problems=item.score.num_problems,
        accuracy=item.score.accuracy,
        low=low,
        high=high,
    )


def _lines(file: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    """Where each JSON object begins, and the object. A line that is being written is none yet: the file stays before
    it."""
    while True:
        start = file.tell()
        line = file.readline(_MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            file.seek(start)
            return
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield start, _finite(value)


def _finite(value: Any) -> Any:
    """Without the numbers that JSON does not have: a reader's JSON.parse would fail on them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
