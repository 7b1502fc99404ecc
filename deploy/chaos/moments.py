"""The named points of a run, seen from outside: its run directory shows them, and no code of the run helps."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from actors.run_log import CHECKPOINTS, METRICS, Event
from deploy.chaos.faults import Moment

_POLL_S = 0.001


class EventTail:
    """The events of a run directory as they are written."""

    def __init__(self, run_dir: Path) -> None:
        """From the first event that is there."""
        self._path, self._offset = run_dir / METRICS, 0

    def new(self) -> list[Event]:
        """Those since the last call. A line that is not finished waits."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                written = file.read()
        except FileNotFoundError:
            return []
        whole = written[: written.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [event for line in whole.splitlines() if (event := _event(line)) is not None]


def wait_for(
    moment: Moment, run_dir: Path, checkpoint_every_rounds: int, is_over: Callable[[], bool], timeout_s: float
) -> bool:
    """Wait for a moment; False when the run `is_over` or `timeout_s` has passed before it came."""
    tail = EventTail(run_dir)
    tail.new()
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not is_over():
        match moment:
            case Moment.PUBLISHED:
                rounds = [event["round"] + 1 for event in tail.new() if event["event"] == "round"]
                if any(done % checkpoint_every_rounds == 0 for done in rounds):
                    return True
            case Moment.CHECKPOINT:
                if _is_writing(run_dir / CHECKPOINTS):
                    return True
            case Moment.WRITTEN:
                if any(event["event"] == "checkpoint" for event in tail.new()):
                    return True
            case Moment.ANY | Moment.COLLECTIVE:
                return True
        time.sleep(_POLL_S)
    return False


def _is_writing(checkpoints: Path) -> bool:
    try:
        return any(name.startswith(".") and name.endswith(".partial") for name in os.listdir(checkpoints))
    except FileNotFoundError:
        return False


def _event(line: bytes) -> Event | None:
    try:
        event: Event = json.loads(line)
    except ValueError:
        return None
    return event
