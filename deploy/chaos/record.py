"""What a session saw: the judge decides from these alone."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.run_log import CHECKPOINTS, METRICS, SAMPLES, Event, read_events
from deploy.chaos.driver import OutputLine
from deploy.chaos.expectations import FaultOutcome
from deploy.chaos.faults import Fault, Setting
from learner.model.checkpoint_files import ADAPTER, WEIGHTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Blow:
    """A fault that was carried out, and what became of the run."""

    fault: Fault
    """What was done."""
    victim: str
    """To whom: `SamplerWorker.generate, process 4711`."""
    round: int
    """Rounds that the run had done."""
    at_s: float
    """When, on the session's clock."""
    over_at_s: float
    """When it was over: after a stopped process went on, a full disk was emptied. A kill is over at once."""
    back_after_s: float | None
    """Seconds from there until the role was there again and the run had made progress; None when it got stuck."""
    outcome: FaultOutcome
    """What became of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drive:
    """One `d1 train` from its start to its end."""

    began_s: float
    """On the session's clock."""
    ended_s: float
    """Likewise."""
    status: int
    """Its exit status; -9 after SIGKILL."""
    was_helped: bool
    """Whether the session killed it because it was stuck."""
    lines: tuple[OutputLine, ...]
    """What it printed."""
    leftovers: tuple[str, ...]
    """Processes that were left some time after its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What a run directory says in the end."""

    events: tuple[Event, ...]
    """The event log."""
    samples: tuple[dict[str, Any], ...]
    """The completions that were kept for reading."""
    digests: dict[str, str]
    """SHA-256 of the weights of each checkpoint, by its name."""
    num_unreadable: int
    """Lines of the event log that are no events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A disturbed run."""

    name: str
    """Its name."""
    setting: Setting
    """What it ran on."""
    drives: tuple[Drive, ...]
    """Every `d1 train` that it took."""
    blows: tuple[Blow, ...]
    """What was done to it."""
    history: History
    """What it left."""


def read_history(run_dir: Path) -> History:
    """Read a run directory."""
    text = (run_dir / METRICS).read_text(encoding="utf-8", errors="replace") if (run_dir / METRICS).is_file() else ""
    events = read_events(run_dir)
    samples = (run_dir / SAMPLES).read_text(encoding="utf-8") if (run_dir / SAMPLES).is_file() else ""
    digests = {
        path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name in (WEIGHTS, ADAPTER)
        for path in sorted((run_dir / CHECKPOINTS).glob(f"[!.]*/{name}"))
    }
    return History(
        events=tuple(events),
        # Not `splitlines`: they are written as they are, and a text may have other ends of a line.
        samples=tuple(json.loads(line) for line in samples.split("\n") if line.endswith("}")),
        digests=digests,
        num_unreadable=len(text.splitlines()) - len(events),
    )
