"""Listing of run directories: state, progress and accuracy of each run."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from actors.coordination.reporting.status import SILENT_S, RunStatus
from actors.run_log import CHECKPOINTS, METRICS, RECIPE, Event, read_events
from deploy.errors import UserError
from deploy.printing import printable, rough_duration, sparkline
from deploy.program import program
from deploy.recipe.yaml_text import parse_yaml
from deploy.runs.history import RunHistory, read_history
from deploy.runs.lock import Holder, holder_of, last_holder_of

if TYPE_CHECKING:
    from rich.table import Table

# Silence after which a run that writes no status counts as stopped. One batch of completions may take 600 s.
_SILENT_S = 900.0
_SPARKLINE_WIDTH = 10
_NAME = "run"
_NUMBERS = ("silent", "rounds", "held-out", "best", "time")
_FIRST_TO_YIELD = ("reward", "time", "silent", "best", "task", "rounds", "held-out", "state")
LATEST = "latest"
"""The link in a directory of runs to the run that was last started or resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Snapshot of a run directory."""

    directory: Path
    """Where it is."""
    recipe: dict[str, Any]
    """The resolved recipe as plain data, so that runs of an older d1 can be listed too. Empty if unreadable."""
    events: Sequence[Event]
    """Its events, in order."""
    history: RunHistory
    """The same, aggregated."""
    seconds_since_event: float
    """Seconds since its last event."""
    status: RunStatus | None
    """The status that the run last wrote; None if it has written none yet."""
    holder: Holder | None
    """The process on this machine that runs it; None if there is none."""
    has_ended: bool
    """Whether it has certainly ended: it is finished, or the process on this machine that ran it last is gone."""

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.directory.name

    @property
    def age_s(self) -> float:
        """Seconds since the last status, or without one since the last event."""
        return max(0.0, time.time() - self.status.at if self.status else self.seconds_since_event)

    @property
    def is_running(self) -> bool:
        """Whether a process runs it; a guess from the age of its status or events if the process is not known."""
        return not self.has_ended and (self.holder is not None or self.age_s < (SILENT_S if self.status else _SILENT_S))

    @property
    def state(self) -> str:
        """`finished`, or `running` if a process here holds the lock; else a guess with a question mark.

        A lock held on another machine is not visible here."""
        if self.history.is_finished:
            return "finished"
        if self.holder is not None:
            return "running"
        return "running?" if self.is_running else "stopped?"

    @property
    def task(self) -> str:
        """The task's name."""
        return str(self.recipe.get("task", {}).get("name", "?"))


def read_run(directory: Path) -> Run:
    """Read a run directory. It needs no Ray, so any machine that sees the directory can do it."""
    recipe: Any = {}
    # Without a recipe its events can still be shown.
    with suppress(OSError, ValueError):
        recipe = parse_yaml((directory / RECIPE).read_text(encoding="utf-8"))
    holder, last = holder_of(directory), last_holder_of(directory)
    events = read_events(directory)
    history = read_history(events)
    return Run(
        directory=directory,
        recipe=recipe if isinstance(recipe, dict) else {},
        events=events,
        history=history,
        seconds_since_event=time.time() - _last_event_at(directory),
        status=RunStatus.read(directory),
        holder=holder,
        has_ended=holder is None and (history.is_finished or (last is not None and last.is_here)),
    )


def newest_run(runs_dir: Path) -> Path:
    """Return the run with the newest event. Raises UserError if there is none."""
    directories = _run_dirs(runs_dir)
    if not directories:
        raise UserError(f"there is no run in {runs_dir}; `make train` or `{program()} train RECIPE` makes one")
    return max(directories, key=_last_event_at)


def newest_servable_run(runs_dir: Path) -> Path:
    """Return the run with the newest event that has a checkpoint to serve. Raises UserError if there is none."""
    # Imported here because it imports torch, which `d1 runs` need not wait for.
    from actors.checkpoints.selection import servable_checkpoints

    runs = sorted(_run_dirs(runs_dir), key=_last_event_at, reverse=True)
    for directory in runs:
        if servable_checkpoints(directory / CHECKPOINTS):
            return directory
    what = "no run in it has a checkpoint yet" if runs else "there is no run in it"
    raise UserError(
        f"nothing in {runs_dir} can be served: {what}; `make train` or `{program()} train RECIPE` makes one"
    )


def _last_event_at(directory: Path) -> float:
    return (directory / METRICS).stat().st_mtime


def list_runs(runs_dir: Path) -> list[Run]:
    """Read the runs of a directory, the one with the newest event first."""
    return sorted((read_run(path) for path in _run_dirs(runs_dir)), key=lambda run: run.seconds_since_event)


def runs_table(runs: list[Run], width: int) -> Table:
    """Build a table with a row per run. Columns that do not fit in `width` are dropped; names are never cut."""
    from rich.table import Table
    from rich.text import Text

    rows = [{heading: printable(cell) for heading, cell in _cells(run).items()} for run in runs]
    sizes = {heading: max(len(heading), *(len(row[heading]) for row in rows)) for heading in rows[0]}
    for heading in _FIRST_TO_YIELD:
        if sum(size + 1 for size in sizes.values()) > width:
            del sizes[heading]
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in sizes:
        is_name = heading == _NAME
        justify: Literal["left", "right"] = "right" if heading in _NUMBERS else "left"
        # A name that is wider than the terminal wraps.
        table.add_column(heading, justify=justify, no_wrap=not is_name, overflow="fold" if is_name else "ellipsis")
    for row in rows:
        table.add_row(*(Text(row[heading]) for heading in sizes))
    return table


def _cells(run: Run) -> dict[str, str]:
    """Format the cells of a run, by heading."""
    history = run.history
    accuracies = [item.score.accuracy for item in history.heldout]
    return {
        _NAME: run.name,
        "state": run.state,
        "silent": rough_duration(run.seconds_since_event),
        "task": run.task,
        "rounds": str(len(history.rounds)),
        "held-out": f"{100 * accuracies[-1]:.1f} %" if accuracies else "",
        "best": f"{100 * max(accuracies):.1f} %" if accuracies else "",
        "time": rough_duration(history.seconds),
        "reward": sparkline(history.series("reward"), _SPARKLINE_WIDTH),
    }


def run_names(runs_dir: Path) -> list[str]:
    """Return the names of the runs in a directory, with the link `latest` if it exists."""
    return [path.name for path in _run_dirs(runs_dir)] + [LATEST] * (runs_dir / LATEST).is_dir()


def point_latest_at(run_dir: Path) -> None:
    """Point the link `latest`, next to a run, at that run. A file or directory of that name is left alone."""
    link = run_dir.with_name(LATEST)
    if run_dir.name == LATEST or (link.exists() and not link.is_symlink()):
        return
    # Replaced atomically, so that the link is never missing. A file system without links gets none.
    fresh = run_dir.with_name(f".{LATEST}.{os.getpid()}")
    with suppress(OSError):
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(run_dir.name)
        fresh.replace(link)


def _run_dirs(runs_dir: Path) -> list[Path]:
    """List each run once: a link to another run of the same directory is an alias."""
    found = [path.parent for path in runs_dir.glob("*/" + METRICS) if not path.parent.name.startswith(".")]
    return [path for path in found if not (path.is_symlink() and path.resolve().parent == runs_dir.resolve())]
