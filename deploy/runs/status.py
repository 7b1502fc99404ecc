"""How a run stands, as its directory tells it: without Ray, and so from every machine that sees the directory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from actors.coordination.status import RunStatus
from actors.coordination.timeline import TIMELINE, Span, idle_shares, num_rounds, read_trace
from actors.run_log import METRICS, Event, read_events
from deploy.runs.history import RunHistory, read_history
from deploy.runs.lock import Holder, holder_of, last_holder_of

SILENT_S = 15.0
"""A run says something of itself every two seconds. After so many without a word something is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSnapshot:
    """A run at the moment when its directory was read."""

    directory: Path
    """The run directory."""
    status: RunStatus | None
    """What the run last said of itself; None where it has said nothing yet."""
    age_s: float
    """Seconds since it said anything."""
    holder: Holder | None
    """The process of this machine that runs it; None where there is none."""
    has_ended: bool
    """Whether it is certain that nothing runs it: it is done, or who ran it here is no more."""
    history: RunHistory
    """Its events."""
    failures: tuple[Event, ...]
    """The `failure` events, in order."""
    idle: Mapping[str, float]
    """For each actor the share of the time of the newest rounds that it did not work, 0 to 1."""
    num_rounds: int
    """Those rounds."""

    @property
    def is_running(self) -> bool:
        """Whether a process runs it; where that cannot be known, whether it has just said something."""
        return not self.has_ended and (self.holder is not None or self.age_s < SILENT_S)


def read_standing(directory: Path) -> RunSnapshot:
    """Read how a run stands."""
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
