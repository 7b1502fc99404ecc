"""Terminal output of evaluations: progress bar, tables of results and of comparisons."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self

from deploy.offline.evaluation.compare import CellComparison, tenths
from deploy.offline.evaluation.evaluate import PreparedCell
from deploy.printing import counted, duration, printable, share
from deploy.wait_display import EVERY_S, progress_bar

if TYPE_CHECKING:
    from rich.table import Table


_NAMES = {"items": "parts, %"}
# A narrow terminal drops the last ones first.
_NUMBERS = ("tokens", "a forward", "cut", "worker time")
# Maximum problems that a caption lists. `results.json` lists all.
_MOST_NAMED = 20


class AnswerBar:
    """Progress of an evaluation on stderr: a bar on a terminal, otherwise a line every 5 s."""

    def __init__(self, prepared: Sequence[PreparedCell]) -> None:
        from rich.console import Console

        self._records = [one.record for one in prepared]
        self._total = sum(len(batch.items) for one in prepared for batch in one.batches)
        self._said = time.monotonic()
        self._progress = progress_bar(Console(stderr=True), transient=True)
        self._task = self._progress.add_task("answers", total=self._total, completed=self.num_done, facts="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @property
    def num_done(self) -> int:
        """Number of answers so far."""
        return sum(len(record.recorded.answers) for record in self._records)

    def advance(self, one: PreparedCell) -> None:
        """Show the progress after a completed batch of a cell."""
        answers = one.record.recorded.answers
        note = f"{one.cell.name}: {sum(answer.correct for answer in answers)} of {len(answers)} right"
        self._progress.update(self._task, completed=self.num_done, facts=note)
        if self._progress.disable and time.monotonic() - self._said > EVERY_S:
            self._said = time.monotonic()
            sys.stderr.write(f"d1: {self.num_done} of {counted(self._total, 'answer')}; {note}\n")


def tables(found: Mapping[str, Any], width: int) -> Iterator[Table]:
    """Yield a table per task, with a row per length and schedule, at most `width` columns wide."""
    for task, cells in groupby(found["cells"], key=lambda cell: cell["task"]):
        yield _table(f"{task}: {found['checkpoint']['name']}", list(cells), width)


def _table(title: str, cells: Sequence[Mapping[str, Any]], width: int) -> Table:
    """Return a table with as many columns as fit into the width without truncating numbers."""
    from rich.console import Console

    tables = (_drawn_table(title, cells, _NUMBERS[:count]) for count in range(len(_NUMBERS), 0, -1))
    fitting = (table for table in tables if Console(width=1000).measure(table).maximum <= width)
    return next(fitting, _drawn_table(title, cells, ()))


def _drawn_table(title: str, cells: Sequence[Mapping[str, Any]], numbers: Sequence[str]) -> Table:
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table, extras = Table(title=Text(printable(title)), caption=escape(_caption(cells))), _extras(cells)
    table.add_column("slots", justify="right")
    table.add_column("denoising", no_wrap=True)
    for name in ("solved, %", *(_NAMES.get(key, f"{key}, %") for key in extras), *numbers):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        rate = cell["tokens_per_forward"]
        shown = {
            "tokens": f"{cell['mean_tokens']:.1f}",
            "a forward": "" if rate is None else f"{rate:.2f}",
            "cut": f"{100 * cell['truncated']:.0f} %",
            "worker time": duration(cell["worker_seconds"]),
        }
        table.add_row(
            str(cell["gen_length"]),
            cell["schedule"],
            share(cell["accuracy"], cell["accuracy_interval"]),
            *(share(cell[key], cell[f"{key}_interval"]) for key in extras),
            *(shown[name] for name in numbers),
        )
    return table


def _caption(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return the caption: the number of problems, and caveats of the results."""
    said = [f"n = {cells[0]['num_problems']}", "95 % intervals in brackets"]
    if (samples := cells[0]["num_samples"]) > 1:
        temperature = cells[0]["temperature"]
        at = "" if temperature is None else f" at temperature {temperature:g}"
        said.append(f"{samples} samples of each{at}")
    if num_ungraded := sum(cell["ungraded"] for cell in cells):
        said.append(f"{counted(num_ungraded, 'answer')} could not be graded and count as wrong")
    if names := list(dict.fromkeys(name for cell in cells for name in cell.get("without_room", ()))):
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        what = f"{counted(len(names), 'prompt')} without room for a completion count as wrong"
        said.append(f"{what}: {', '.join(map(printable, names[:_MOST_NAMED]))}{more}")
    return "; ".join(said)


def _extras(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the metrics that not every task has: the share of items, and the largest pass@k."""
    at = [key for key in cells[0] if key.startswith("pass@") and not key.endswith("_interval")]
    return [*(["items"] if "items" in cells[0] else []), *at[-1:]]


def compared_tables(found: Sequence[CellComparison], names: tuple[str, str]) -> Iterator[Table]:
    """Yield a table per task and sampling, with a row per cell of both evaluations."""
    for what, cells in groupby(found, key=_what):
        yield _compared_table(f"{what}   A: {names[0]}   B: {names[1]}", list(cells))


def _what(one: CellComparison) -> str:
    """Return the task of a comparison, with the settings that are not the default."""
    protocol = "" if one.protocol == "fixed" else f", protocol {one.protocol}"
    if one.temperature is None:
        return f"{one.task}{protocol}" + (f", {one.num_samples} of each" if one.num_samples > 1 else "")
    drawn = f", {one.num_samples} at temperature {one.temperature:g}" if one.temperature else ""
    return f"{one.task}{protocol}{drawn}"


def _compared_table(title: str, cells: Sequence[CellComparison]) -> Table:
    from rich.table import Table
    from rich.text import Text

    caption = "only A/B: problems that A solves more often than B, and B than A"
    table = Table(title=Text(printable(title)), caption=caption)
    table.add_column("slots", justify="right")
    table.add_column("denoising", no_wrap=True)
    for name in ("n", "A, %", "B, %", "B - A, points", "only A/B"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in cells:
        low, high = (tenths(100 * bound) for bound in one.interval)
        table.add_row(
            str(one.gen_length),
            one.schedule,
            str(one.num_problems),
            *(f"{100 * accuracy:.1f}" for accuracy in one.accuracies),
            f"{tenths(100 * one.difference)} ({low} to {high})",
            "{} / {}".format(*one.only),
        )
    return table
