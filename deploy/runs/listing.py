"""Listing of run directories: state, progress and accuracy of each run."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from actors.run_log import CHECKPOINTS, METRICS, RECIPE, read_events
from deploy.errors import UserError
from deploy.printing import printable, rough_duration, sparkline
from deploy.program import program
from deploy.recipe.yaml_text import parse_yaml
from deploy.runs.history import RunHistory, read_history
from deploy.runs.lock import holder_of

if TYPE_CHECKING:
    from rich.table import Table

# Longer than any pause that a healthy run makes by default: one batch of completions may take 600 s.
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
    history: RunHistory
    """What happened."""
    seconds_since_event: float
    """Seconds since its last event."""
    is_locked_here: bool
    """Whether a process on this machine holds the directory's lock."""

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.directory.name

    @property
    def state(self) -> str:
        """`finished`, or `running` if a process here holds the lock; else a guess with a question mark.

        The guess is from the time since the last event: a lock held on another machine is not visible here."""
        if self.history.is_finished:
            return "finished"
        if self.is_locked_here:
            return "running"
        return "running?" if self.seconds_since_event < _SILENT_S else "stopped?"

    @property
    def task(self) -> str:
        """The task's name."""
        return str(self.recipe.get("task", {}).get("name", "?"))


def read_run(directory: Path) -> Run:
    """Read a run directory."""
    recipe: Any = {}
    # Without a recipe its events can still be shown.
    with suppress(OSError, ValueError):
        recipe = parse_yaml((directory / RECIPE).read_text(encoding="utf-8"))
    silent_s = time.time() - (directory / METRICS).stat().st_mtime
    return Run(
        directory=directory,
        recipe=recipe if isinstance(recipe, dict) else {},
        history=read_history(read_events(directory)),
        seconds_since_event=silent_s,
        is_locked_here=holder_of(directory) is not None,
    )


def newest_run(runs_dir: Path) -> Path:
    """Return the run with the newest event. Raises UserError if there is none."""
    directories = _run_dirs(runs_dir)
    if not directories:
        raise UserError(f"there is no run in {runs_dir}; `make train` or `{program()} train RECIPE` makes one")
    return max(directories, key=lambda path: (path / METRICS).stat().st_mtime)


def newest_servable_run(runs_dir: Path) -> Path:
    """Return the run with the newest event that has a checkpoint to serve. Raises UserError if there is none."""
    # Imported here because it imports torch, which `d1 runs` need not wait for.
    from actors.checkpoints.selection import servable_checkpoints

    runs = sorted(_run_dirs(runs_dir), key=lambda path: (path / METRICS).stat().st_mtime, reverse=True)
    for directory in runs:
        if servable_checkpoints(directory / CHECKPOINTS):
            return directory
    what = "no run in it has a checkpoint yet" if runs else "there is no run in it"
    raise UserError(
        f"nothing in {runs_dir} can be served: {what}; `make train` or `{program()} train RECIPE` makes one"
    )


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
