"""Plots of accuracy against compute (slots and forwards), with the Pareto front."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, groupby
from typing import TYPE_CHECKING

from deploy.report.eval_results import EvalCell, pareto_front
from deploy.report.figures import PALETTE, Plot, draw_with_bars, plot
from deploy.runs.stages import STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NOTE = (
    "Forwards of a completion against the share solved, with 95 % intervals; a colour for each number of slots. "
    "Dotted: SFT; dashed: the control; solid: the others. Diamonds: adaptive schedules. "
    "The grey band is the Pareto front: the best at each cost."
)
_FRONT = "#BBBBBB"


def quality_by_compute(cells: Mapping[str, Sequence[EvalCell]]) -> Iterator[Plot]:
    """Yield a plot for each run and task that was evaluated at several lengths or schedules."""
    for name, found in cells.items():
        for setting, some in groupby(found, key=lambda one: one.setting):
            shown = list(some)
            if len({(one.gen_length, one.schedule) for one in shown}) > 1:
                yield plot(f"Accuracy by slots and forwards: {name}, {setting}", _NOTE, _draw, shown)


def _draw(axes: Axes, cells: Sequence[EvalCell]) -> None:
    from matplotlib.ticker import LogLocator

    axes.set(xlabel="forwards of a completion", ylabel="%", xscale="log")
    best = list(pareto_front(cells))
    points = [one.mean_forwards for one in best], [100 * one.accuracy for one in best]
    axes.plot(*points, color=_FRONT, linewidth=7, alpha=0.5, drawstyle="steps-post", solid_capstyle="butt", zorder=0)
    colors = dict(zip(sorted({one.gen_length for one in cells}), cycle(PALETTE), strict=False))
    for checkpoint in dict.fromkeys(one.checkpoint for one in cells):
        line = STAGES[checkpoint].line if checkpoint in STAGES else "-"
        for length, color in colors.items():
            some = [one for one in cells if (one.checkpoint, one.gen_length) == (checkpoint, length)]
            fixed = [(one.mean_forwards, one) for one in some if not one.is_adaptive]
            free = [(one.mean_forwards, one) for one in some if one.is_adaptive]
            draw_with_bars(axes, fixed, color=color, fmt=f"o{line}", label="")
            draw_with_bars(axes, free, color=color, fmt="D", label="", markerfacecolor="white")
    for length, color in colors.items():
        axes.plot([], [], "o-", color=color, markersize=4, label=f"{length} slots")
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
