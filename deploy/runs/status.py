"""Status of a run, read from its directory: without Ray, so from any machine that sees it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from actors.coordination.reporting.status import SILENT_S, RunStatus
from actors.coordination.reporting.timeline import TIMELINE, Span, idle_shares, num_rounds, read_trace
from actors.run_log import METRICS, Event, read_events
from deploy.runs.history import RunHistory, read_history
from deploy.runs.lock import Holder, holder_of, last_holder_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSnapshot:
    """Status of a run when its directory was read."""

    directory: Path
    """The run directory."""
    status: RunStatus | None
    """The status that the run last wrote; None if it has written none yet."""
    age_s: float
    """Seconds since that status, or without one since the last event."""
    holder: Holder | None
    """The process on this machine that runs it; None if there is none."""
    has_ended: bool
    """Whether it has certainly ended: it is finished, or the process on this machine that ran it last is gone."""
    history: RunHistory
    """Its events."""
    failures: tuple[Event, ...]
    """The `failure` events, in order."""
    idle: Mapping[str, float]
    """Idle share of each actor's time in the newest rounds, 0 to 1."""
    num_rounds: int
    """Number of those rounds."""

    @property
    def is_running(self) -> bool:
        """Whether a process runs it; if that is unknown, whether it was updated within `SILENT_S`."""
        return not self.has_ended and (self.holder is not None or self.age_s < SILENT_S)


def read_snapshot(directory: Path) -> RunSnapshot:
    """Read the status of a run."""
    holder, last = holder_of(directory), last_holder_of(directory)
    status = RunStatus.read(directory)
    events = read_events(directory)
    history = read_history(events)
    spans: list[Span] = read_trace(directory / TIMELINE)
    return RunSnapshot(
        directory=directory,
        status=status,
        age_s=max(0.0, time.time() - (status.at if status else _heard_at(directory))),
        holder=holder,
        has_ended=holder is None and (history.is_finished or (last is not None and last.is_here)),
        history=history,
        failures=tuple(event for event in events if event["event"] == "failure"),
        idle=idle_shares(spans),
        num_rounds=num_rounds(spans),
    )


def _heard_at(directory: Path) -> float:
    try:
        return (directory / METRICS).stat().st_mtime
    except OSError:
        return time.time()
