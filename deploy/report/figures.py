"""Plots of a report, as SVG: one line per run, labelled by colour and name."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby
from typing import TYPE_CHECKING, Any, TypeVar

from deploy.printing import printable
from deploy.report.eval_results import EvalCell, pareto_front
from deploy.runs.history import RunHistory
from deploy.runs.stages import STAGES
from rewards.score import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Runs = Mapping[str, RunHistory]
Interval = Score | EvalCell
"""A share from 0 to 1 with its confidence interval."""
_Shown = TypeVar("_Shown")

_SIZE = (4.8, 3.0)
_SERIES = (
    ("reward", "Reward", "mean reward of a completion"),
    ("correct", "Share correct", "share of training completions"),
    ("preferred", "Preferred", "share of pairs"),
    ("margin", "Margin of the preferred", "beta times nats"),
    ("kl", "KL to the reference", "nats per token"),
    ("entropy", "Entropy at commit", "nats"),
    ("clip_ratio/region_mean", "Clipped tokens", "share of tokens"),
    ("frac_reward_zero_std", "Groups without signal", "share of groups"),
    ("mean_staleness", "Staleness", "versions"),
    ("sampling_s", "Waiting for samples", "seconds of a round"),
    ("training_s", "Training", "seconds of a round"),
    ("tokens_per_s", "Throughput", "tokens per second"),
)
_COMPUTE_NOTE = (
    "Forwards of a completion against the share solved, with 95 % intervals; a colour for each number of slots. "
    "Dotted: SFT; dashed: the control; solid: the others. Diamonds: adaptive schedules. "
    "The grey band is the Pareto front: the best at each cost."
)
_FRONT = "#BBBBBB"
# Line colours, Paul Tol's bright scheme: told apart by colour-blind readers and in print.
_PALETTE = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#888888")
_DIAMOND = {"fmt": "D", "label": "", "markerfacecolor": "white"}
_STYLE = {"font.size": 9, "legend.fontsize": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """One plot."""

    title: str
    """Title above the plot."""
    note: str
    """Caption below the plot."""
    svg: str
    """An `<svg>` element."""


def plots(runs: Runs) -> Iterator[Plot]:
    """Yield the plots for which the runs have data."""
    evaluations = [item for history in runs.values() for item in history.evaluations]
    if evaluations:
        yield plot("Held-out accuracy", "Bars are 95 % intervals (Wilson); crosses are the control.", _accuracy, runs)
    if any(len(item.schedules) > 1 for item in evaluations):
        note = "Dotted: SFT; dashed: the control; solid: RL. Diamonds: adaptive schedules."
        yield plot("Accuracy against compute", note, _by_compute, runs)
    if any(history.steps for history in runs.values()):
        note = (
            "Faintly each step, and the moving mean over a twentieth; dashed: the control; circles: held-out examples."
        )
        yield plot("SFT loss", note, _sft_loss, runs)
    if any(history.rounds for history in runs.values()):
        yield from _plots_of_rounds(runs)


def _plots_of_rounds(runs: Runs) -> Iterator[Plot]:
    note = "Faintly each round, and the moving mean over a twentieth of the rounds."
    for key, title, unit in _SERIES:
        # Not every method has each of them.
        if any(key in event for history in runs.values() for event in history.rounds.values()):
            yield plot(title, note, _series_of(key, unit), runs)
    for name, history in runs.items():
        if any(event.get("reward_parts") for event in history.rounds.values()):
            yield plot(f"Parts of the reward: {name}", "Moving means.", _parts, {name: history})


def plot(title: str, note: str, draw: Callable[[Axes, _Shown], None], shown: _Shown) -> Plot:
    """Render what `draw` draws of `shown` as SVG."""
    from matplotlib import style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    out = io.StringIO()
    # Text stays text, for screen readers and search. A fixed hash salt makes equal plots bit-identical.
    with style.context(["seaborn-v0_8-whitegrid", {**_STYLE, "svg.fonttype": "none", "svg.hashsalt": title}]):
        figure = Figure(figsize=_SIZE, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes, shown)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            legend = axes.legend(loc="best")
            for line in legend.get_texts():
                # A run's name must not be parsed as mathtext.
                line.set_parse_math(False)
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    # The ids of groups are the same in every plot, so they would clash in one page. Nothing refers to them.
    svg = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg") :])
    return Plot(title=printable(title), note=note, svg=svg)


def _coloured(runs: Runs) -> Iterator[tuple[str, RunHistory, str]]:
    for index, (name, history) in enumerate(runs.items()):
        yield _label(name), history, _PALETTE[index % len(_PALETTE)]


def _label(name: str) -> str:
    """Format a name for a legend, which omits labels that begin with an underscore."""
    return f" {printable(name)}" if name.startswith("_") else printable(name)


def _accuracy(axes: Axes, runs: Runs) -> None:
    axes.set(xlabel="minutes since the start", ylabel="%")
    for name, history, color in _coloured(runs):
        course = history.accuracy_curve
        draw_with_bars(axes, [(item.drawn_s / 60, item.score) for item in course], color=color, fmt="o-", label=name)
        control = [(item.drawn_s / 60, item.score) for item in history.evaluations if item.label == "control"]
        draw_with_bars(axes, control, color=color, fmt="x", label="")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def _by_compute(axes: Axes, runs: Runs) -> None:
    axes.set(xlabel="forwards of a completion", ylabel="%", xscale="log")
    ticks: set[int] = set()
    for run, history, color in _coloured(runs):
        for label, stage in STAGES.items():
            item = history.final(label)
            if item is not None and len(item.schedules) > 1:
                points = [
                    (scored.mean_steps, scored.score, not name[0].isdigit()) for name, scored in item.schedules.items()
                ]
                ticks |= {round(steps) for steps, _, is_adaptive in points if not is_adaptive}
                draw_by_compute(axes, points, color=color, line=stage.line, label=run if label == "rl" else "")
    axes.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)


def draw_by_compute(
    axes: Axes, points: Sequence[tuple[float, Interval, bool]], *, color: str, line: str, label: str = ""
) -> None:
    """Plot shares against forwards: a line, and a diamond for each schedule that is adaptive (the last of a point)."""
    for is_adaptive, style in ((False, {"fmt": f"o{line}", "label": label}), (True, _DIAMOND)):
        some = sorted((point[:2] for point in points if point[2] is is_adaptive), key=lambda point: point[0])
        draw_with_bars(axes, some, color=color, **style)


def draw_with_bars(
    axes: Axes, points: Sequence[tuple[float, Interval]], *, color: str, fmt: str, label: str, **more: Any
) -> None:
    """Plot shares in percent with their intervals, against `x` values; an empty label is left out of the legend."""
    if not points:
        return
    middles = [100 * score.accuracy for _, score in points]
    # The Wilson interval contains the share, except for rounding errors at 0 and 1.
    lows = [max(0.0, 100 * (score.accuracy - score.interval[0])) for _, score in points]
    highs = [max(0.0, 100 * (score.interval[1] - score.accuracy)) for _, score in points]
    style = {"markersize": 4, "elinewidth": 1, "capsize": 2, "linewidth": 1.4, **more}
    axes.errorbar(
        [x for x, _ in points], middles, yerr=[lows, highs], fmt=fmt, color=color, label=label or "_", **style
    )


def _sft_loss(axes: Axes, runs: Runs) -> None:
    axes.set(xlabel="optimizer step", ylabel="nats per token", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    for name, history, color in _coloured(runs):
        for phase, steps in history.steps.items():
            is_control = phase == "control"
            # The control continues from the end of SFT.
            first = history.planned.get("sft", 0) if is_control else 0
            line, label = (STAGES[phase].line, "_") if is_control else ("-", name)
            xs, losses = [first + step["step"] for step in steps], [step["loss"] for step in steps]
            _draw_smooth(axes, xs, losses, color=color, label=label, line=line)
            held_out = history.sft_losses.get(phase, [])
            places, losses = [first + item["step"] for item in held_out], [item["loss"] for item in held_out]
            axes.plot(places, losses, "o", color=color, markersize=4, markerfacecolor="white")


def _draw_smooth(
    axes: Axes, xs: Sequence[float], values: Sequence[float], *, color: str, label: str, line: str = "-"
) -> None:
    """Draw the values faintly, and their moving mean."""
    axes.plot(xs, values, line, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(xs, smooth(values), line, color=color, linewidth=1.8, marker="o" if len(xs) == 1 else None, label=label)


def smooth(values: Sequence[float]) -> list[float]:
    """Return for each value the mean of those up to it, over a twentieth of all."""
    width = max(1, len(values) // 20)
    windows = [values[max(0, index + 1 - width) : index + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _series_of(key: str, unit: str) -> Callable[[Axes, Runs], None]:
    def draw(axes: Axes, runs: Runs) -> None:
        axes.set(xlabel="round", ylabel=unit)
        for name, history, color in _coloured(runs):
            _draw_smooth(axes, history.round_numbers, history.series(key), color=color, label=name)

    return draw


def _parts(axes: Axes, runs: Runs) -> None:
    axes.set(xlabel="round", ylabel="mean of a completion")
    ((_, history),) = runs.items()
    names = dict.fromkeys(name for event in history.rounds.values() for name in event.get("reward_parts", {}))
    for index, name in enumerate(names):
        values = [float(event.get("reward_parts", {}).get(name, 0.0)) for event in history.rounds.values()]
        axes.plot(history.round_numbers, smooth(values), color=_PALETTE[index % len(_PALETTE)], label=_label(name))


def quality_by_compute(cells: Mapping[str, Sequence[EvalCell]]) -> Iterator[Plot]:
    """Yield a plot for each run and task that was evaluated at several lengths or schedules."""
    for name, found in cells.items():
        for setting, some in groupby(found, key=lambda one: one.setting):
            shown = list(some)
            if len({(one.gen_length, one.schedule) for one in shown}) > 1:
                yield plot(
                    f"Accuracy by slots and forwards: {name}, {setting}", _COMPUTE_NOTE, _cells_by_compute, shown
                )


def _cells_by_compute(axes: Axes, cells: Sequence[EvalCell]) -> None:
    from matplotlib.ticker import LogLocator

    axes.set(xlabel="forwards of a completion", ylabel="%", xscale="log")
    best = list(pareto_front(cells))
    front = [one.mean_forwards for one in best], [100 * one.accuracy for one in best]
    axes.plot(*front, color=_FRONT, linewidth=7, alpha=0.5, drawstyle="steps-post", solid_capstyle="butt", zorder=0)
    colors = dict(zip(sorted({one.gen_length for one in cells}), cycle(_PALETTE), strict=False))
    for checkpoint in dict.fromkeys(one.checkpoint for one in cells):
        line = STAGES[checkpoint].line if checkpoint in STAGES else "-"
        for length, color in colors.items():
            points: list[tuple[float, Interval, bool]] = [
                (one.mean_forwards, one, one.is_adaptive)
                for one in cells
                if (one.checkpoint, one.gen_length) == (checkpoint, length)
            ]
            draw_by_compute(axes, points, color=color, line=line)
    for length, color in colors.items():
        axes.plot([], [], "o-", color=color, markersize=4, label=f"{length} slots")
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
