"""A run directory as the page reads it. Its files are written by the run while they are read."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from actors.checkpoints.selection import checkpoints_to_answer
from actors.registry.records import PolicyVersion
from actors.run_log import CHECKPOINTS, METRICS, RECIPE, SAMPLES
from deploy.recipe.yaml_text import parse_yaml
from deploy.service.api.replies import Run, RunEvents, RunProblems, Samples
from deploy.service.checkpoints import Checkpoints
from deploy.service.example import example_problems

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
        self._lock = threading.Lock()
        self._versions: tuple[int, ...] = ()
        self._looked_at = -math.inf

    def summary(self) -> Run:
        """Its name, when it began, and where it is."""
        phase, began_at, is_done = None, None, False
        for event in _objects(self._directory / METRICS):
            if event.get("event") == "run" and began_at is None:
                began_at = event.get("began_at")
            elif event.get("event") == "phase":
                phase, is_done = event.get("phase"), False
            elif event.get("event") == "done":
                is_done = True
        recipe = parse_yaml((self._directory / RECIPE).read_text(encoding="utf-8"))
        return Run(
            name=self._directory.name,
            began_at=began_at,
            phase="done" if is_done else phase,
            num_rounds=(recipe.get("learner") or {}).get("num_rounds"),
            recipe=recipe,
        )

    @cached_property
    def problems(self) -> RunProblems:
        """What its policy could be asked. The first time this reads the task's data."""
        task, problems = example_problems(self._directory)
        turns = [problem.messages[0] for problem in problems if len(problem.messages) == 1]
        return RunProblems(task=task, prompts=[turn.content for turn in turns if turn.role == "user"])

    def events(self, after: int) -> RunEvents:
        """The events after the first `after`, a page of them at most."""
        events = self._metrics.objects(after, MAX_EVENTS)
        return RunEvents(events=events, next=after + len(events))

    def samples(self, limit: int) -> Samples:
        """The newest samples, the newest last."""
        return Samples(samples=self._samples.last(limit))

    def versions(self) -> tuple[int, ...]:
        """The policy versions that have checkpoints, as it was seconds ago."""
        with self._lock:
            # A long run has hundreds of them, and each has a file that is read.
            if time.monotonic() - self._looked_at > _TTL_S:
                found = checkpoints_to_answer(self._directory / CHECKPOINTS)
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
            # Another run's file under the same name.
            self._starts, self._end = [], 0
        file.seek(self._end)
        for start, _ in _lines(file):
            self._starts.append(start)
        self._end = file.tell()


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file of lines."""
    if path.is_file():
        with path.open("rb") as file:
            yield from (value for _, value in _lines(file))


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
