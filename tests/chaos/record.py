"""Observations of a session, from which the checker decides."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.run_log import CHECKPOINTS, METRICS, SAMPLES, Event, read_events
from benchmarks.processes.child_process import OutputLine
from learner.model.checkpoint_files import ADAPTER, MODEL, WEIGHTS, shard_files
from tests.chaos.faults import Fault, FaultOutcome, Platform


@dataclass(frozen=True, kw_only=True, slots=True)
class InjectedFault:
    """A fault that was injected, and its outcome. Times are on the monotonic clock."""

    fault: Fault
    """The fault."""
    victim: str
    """What was hit, such as `SamplerWorker.generate, process 4711`."""
    round: int
    """Completed rounds at that time."""
    began_s: float
    """Time of injection."""
    ended_s: float
    """End of the fault: a stopped process continues, or a full disk is emptied. A kill ends at once."""
    recovery_s: float | None
    """Seconds from the end of the fault until the role was complete and the run progressed; None if it got stuck."""
    outcome: FaultOutcome
    """What it led to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One `d1 train` from start to end. Times are on the monotonic clock."""

    began_s: float
    """Time of its start."""
    ended_s: float
    """Time of its end."""
    status: int
    """Exit status; -9 after SIGKILL."""
    was_stuck: bool
    """Whether the session killed it because it made no progress."""
    lines: tuple[OutputLine, ...]
    """Its output."""
    leftovers: tuple[str, ...]
    """Processes that were left some time after its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """Content of a run directory after the run."""

    events: tuple[Event, ...]
    """The event log."""
    samples: tuple[dict[str, Any], ...]
    """The sample completions."""
    digests: dict[str, str]
    """SHA-256 of each checkpoint's weights, by its name."""
    num_unreadable: int
    """Lines of the event log that are not events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A run with injected faults."""

    name: str
    """Name of the run."""
    platform: Platform
    """What it ran on."""
    launches: tuple[Launch, ...]
    """Every `d1 train` that it took."""
    injected: tuple[InjectedFault, ...]
    """The faults."""
    history: History
    """Its run directory."""


def trained_files(directory: Path) -> list[Path]:
    """List the files of a checkpoint's own directory with its adapter or weights, which may be in shards."""
    whole = [directory / name for name in (ADAPTER, WEIGHTS) if (directory / name).is_file()]
    return whole or shard_files(directory, MODEL)


def read_history(run_dir: Path) -> History:
    """Read a run directory."""
    text = (run_dir / METRICS).read_text(encoding="utf-8", errors="replace") if (run_dir / METRICS).is_file() else ""
    events = read_events(run_dir)
    samples = (run_dir / SAMPLES).read_text(encoding="utf-8") if (run_dir / SAMPLES).is_file() else ""
    digests = {
        directory.name: hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
        for directory in sorted((run_dir / CHECKPOINTS).glob("[!.]*/"))
        if (files := trained_files(directory))
    }
    return History(
        events=tuple(events),
        # `splitlines` would also split at other line separators within a text.
        samples=tuple(json.loads(line) for line in samples.split("\n") if line.endswith("}")),
        digests=digests,
        num_unreadable=len(text.splitlines()) - len(events),
    )
