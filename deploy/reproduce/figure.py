"""The curves of a reproduction as one picture: above, accuracy by length for each row; below, reward by round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from actors.run_log import read_events
from deploy.reproduce.plan import Step, Training
from deploy.reproduce.table import CellOfTable
from deploy.runs.curves import PALETTE, STYLE, draw_smooth, save, with_bars
from deploy.runs.history import read_history

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(steps: Sequence[Step], cells: Sequence[CellOfTable], rows: Sequence[str], path: Path) -> None:
    """Draw what there is; without any cell nothing is written."""
    if not cells:
        return
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(cell.task for cell in cells))
    colours = {row: PALETTE[index % len(PALETTE)] for index, row in enumerate(rows)}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.6 * len(tasks), 6.4), layout="constrained")
        FigureCanvasAgg(figure)
        for column, task in enumerate(tasks):
            above = figure.add_subplot(2, len(tasks), 1 + column)
            _by_length(above, [cell for cell in cells if cell.task == task], colours)
            above.set_title(f"{task}: held-out accuracy, 95 % interval")
            below = figure.add_subplot(2, len(tasks), 1 + len(tasks) + column)
            _by_round(below, [one for one in steps if isinstance(one, Training) and one.task == task], colours)
        save(figure, path)


def _by_length(axes: Axes, cells: Sequence[CellOfTable], colours: dict[str, str]) -> None:
    axes.set(xlabel="slots", ylabel="%")
    for row, colour in colours.items():
        own = sorted((cell for cell in cells if cell.row == row), key=lambda cell: cell.length)
        if own:
            middles, bars = with_bars(own)
            lengths = [cell.length for cell in own]
            axes.errorbar(lengths, middles, yerr=bars, fmt="o-", color=colour, label=row, capsize=3)
    axes.set_xticks(sorted({cell.length for cell in cells}))
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")


def _by_round(axes: Axes, trainings: Sequence[Training], colours: dict[str, str]) -> None:
    """The mean over seeds, as far as all seeds have come."""
    axes.set(title="reward on training problems", xlabel="round")
    by_row: dict[str, list[list[float]]] = defaultdict(list)
    for training in trainings:
        if training.start_from is not None:
            by_row[training.row].append(read_history(read_events(training.recipe.run_dir)).series("reward"))
    for row, series in by_row.items():
        begun = [values for values in series if values]
        if begun:
            means = [fmean(values) for values in zip(*begun, strict=False)]
            draw_smooth(axes, [float(index + 1) for index in range(len(means))], means, colours[row], row)
    if axes.lines:
        axes.legend(loc="best")
