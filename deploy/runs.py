"""The run directories: which there are and how they stand."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.run_log import CHECKPOINTS, METRICS, RECIPE, read_events
from deploy.errors import UserError
from deploy.history import RunHistory, read_history
from deploy.printing import printable, rough_duration, sparkline
from deploy.run_lock import holder_of, this_host
from deploy.yaml_text import parse_yaml

if TYPE_CHECKING:
    from rich.table import Table

# Longer than any pause that a healthy run makes by default: one batch of completions may take 600 s.
_SILENT_S = 900.0
_SPARKLINE_WIDTH = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run directory as it was when it was read."""

    directory: Path
    """Where it is."""
    recipe: dict[str, Any]
    """The resolved recipe; plain data, so that a run of an older d1 can be listed too. Empty if it cannot be read."""
    history: RunHistory
    """What happened."""
    silent_s: float
    """Seconds since its last event."""
    is_held: bool
    """Whether a process of this machine has the directory's lock."""

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.directory.name

    @property
    def state(self) -> str:
        """`finished`, or `running` where a process here has the lock; else a guess from the silence, with a question
        mark: nobody can ask a run directory."""
        if self.history.is_finished:
            return "finished"
        if self.is_held:
            return "running"
        return "running?" if self.silent_s < _SILENT_S else "stopped?"

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
    holder = holder_of(directory)
    return Run(
        directory=directory,
        recipe=recipe if isinstance(recipe, dict) else {},
        history=read_history(read_events(directory)),
        silent_s=silent_s,
        # A lock of another machine need not have reached this one, nor its end.
        is_held=holder is not None and holder.host == this_host(),
    )


def find_run(name_or_path: str, runs_dir: Path) -> Path:
    """The directory of a run that is given by its name in `runs_dir` or by its path. Raises UserError without one."""
    for directory in (runs_dir / name_or_path, Path(name_or_path)):
        if (directory / METRICS).is_file():
            return directory
    close = get_close_matches(name_or_path, [path.name for path in _run_dirs(runs_dir)], n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else "`d1 runs ls` lists the runs"
    raise UserError(f"there is no run {name_or_path} in {runs_dir}, and no run directory of that path; {hint}")


def newest_to_serve(runs_dir: Path) -> Path:
    """The run with the newest event of those that have a checkpoint to answer from. Raises UserError without one."""
    # It brings torch, for which `d1 runs` does not wait.
    from actors.checkpoints import checkpoints_to_answer

    runs = sorted(_run_dirs(runs_dir), key=lambda path: (path / METRICS).stat().st_mtime, reverse=True)
    for directory in runs:
        if checkpoints_to_answer(directory / CHECKPOINTS):
            return directory
    what = "no run in it has a checkpoint yet" if runs else "there is no run in it"
    raise UserError(f"nothing in {runs_dir} can be served: {what}; `make train` or `d1 train RECIPE` makes one")


def list_runs(runs_dir: Path) -> list[Run]:
    """The runs of a directory, the one with the newest event first."""
    return sorted((read_run(path) for path in _run_dirs(runs_dir)), key=lambda run: run.silent_s)


def runs_table(runs: list[Run]) -> Table:
    """A row for each run, narrow enough for 80 columns."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("run", "state", "silent", "task", "rounds", "held-out", "best", "time", "reward"):
        is_number = heading in ("silent", "rounds", "held-out", "best", "time")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    for run in runs:
        history = run.history
        # The control is another policy than the one the run is for.
        accuracies = [item.score.accuracy for item in history.evaluations if item.label != "control"]
        cells = (
            run.name,
            run.state,
            rough_duration(run.silent_s),
            run.task,
            str(len(history.rounds)),
            f"{100 * accuracies[-1]:.1f} %" if accuracies else "",
            f"{100 * max(accuracies):.1f} %" if accuracies else "",
            rough_duration(history.seconds),
            sparkline(history.series("reward"), _SPARKLINE_WIDTH),
        )
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _run_dirs(runs_dir: Path) -> list[Path]:
    return [path.parent for path in runs_dir.glob("*/" + METRICS) if not path.parent.name.startswith(".")]
