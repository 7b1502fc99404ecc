"""Quality against compute: what more slots and more denoise steps bring, and what brings the same for less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from deploy.report.evaluated import Evaluated, front
from deploy.report.figures import Plot, plot
from deploy.runs.curves import PALETTE, with_bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NOTE = (
    "Each completion's forwards against the share solved, with 95 % intervals; a colour for each number of slots. "
    "Dotted: SFT; dashed: the control; solid: the others. The grey band is the Pareto front: the best at each cost."
)
_LINES = {"sft": ":", "control": "--"}
_FRONT = "#BBBBBB"


def quality_by_compute(cells: Mapping[str, Sequence[Evaluated]]) -> Iterator[Plot]:
    """A plot for each run and each thing that was asked of it at several lengths or schedules."""
    for name, found in cells.items():
        for asked, some in groupby(found, key=lambda one: one.asked):
            shown = list(some)
            if len({(one.gen_length, one.schedule) for one in shown}) > 1:
                yield plot(f"Accuracy by slots and forwards: {name}, {asked}", _NOTE, _draw, shown)


def _draw(axes: Axes, cells: Sequence[Evaluated]) -> None:
    axes.set(xlabel="forwards of a completion", ylabel="%", xscale="log")
    best = list(front(cells))
    points = [one.mean_forwards for one in best], [100 * one.accuracy for one in best]
    axes.plot(*points, color=_FRONT, linewidth=7, alpha=0.5, drawstyle="steps-post", solid_capstyle="butt", zorder=0)
    lengths = sorted({one.gen_length for one in cells})
    for checkpoint in dict.fromkeys(one.checkpoint for one in cells):
        for index, length in enumerate(lengths):
            line = [one for one in cells if (one.checkpoint, one.gen_length) == (checkpoint, length)]
            if not line:
                continue
            middles, bars = with_bars(line)
            style = _LINES.get(checkpoint, "-")
            axes.errorbar(
                [one.mean_forwards for one in line],
                middles,
                yerr=bars,
                fmt=f"o{style}",
                color=PALETTE[index % len(PALETTE)],
                label=f"{length} slots" if style == "-" else "_",
                markersize=4,
                elinewidth=1,
                capsize=2,
                linewidth=1.4,
            )
    ticks = sorted({round(one.mean_forwards) for one in cells})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
