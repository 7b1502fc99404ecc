"""A run directory as the page reads it. Its files are written by the run while they are read."""

from __future__ import annotations

import json
import math
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from actors.run_log import METRICS, RECIPE, SAMPLES

MAX_EVENTS = 1000
MAX_SAMPLES = 200
_MAX_LINE_BYTES = 4 * 1024 * 1024


class RunView:
    """What one run has written so far."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def summary(self) -> dict[str, Any]:
        """Its name, when it began, and where it is."""
        phase, began_at, is_done = None, None, False
        for event in _objects(self._directory / METRICS):
            if event.get("event") == "run" and began_at is None:
                began_at = event.get("began_at")
            elif event.get("event") == "phase":
                phase, is_done = event.get("phase"), False
            elif event.get("event") == "done":
                is_done = True
        recipe = yaml.safe_load((self._directory / RECIPE).read_text(encoding="utf-8"))
        return {
            "name": self._directory.name,
            "began_at": began_at,
            "phase": "done" if is_done else phase,
            "num_rounds": (recipe.get("learner") or {}).get("num_rounds"),
            "recipe": recipe,
        }

    def events(self, after: int) -> dict[str, Any]:
        """The events after the first `after`, a page of them at most."""
        events = [*islice(_objects(self._directory / METRICS), after, after + MAX_EVENTS)]
        return {"events": events, "next": after + len(events)}

    def samples(self, limit: int) -> dict[str, Any]:
        """The newest samples, the newest last."""
        return {"samples": [*deque(_objects(self._directory / SAMPLES), maxlen=limit)]}


def _objects(path: Path) -> Any:
    """The JSON objects of a file of lines; a line that is being written is none yet."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        while line := file.readline(_MAX_LINE_BYTES):
            if not line.endswith(b"\n"):
                return
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield _finite(value)


def _finite(value: Any) -> Any:
    """Without the numbers that JSON does not have: a reader's JSON.parse would fail on them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
