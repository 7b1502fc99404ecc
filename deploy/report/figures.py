"""Plots of a report, as SVG: one line per run, labelled by colour and name."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from deploy.printing import printable
from deploy.runs.history import Evaluation, RunHistory, ScheduleScore
from deploy.runs.stages import STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Runs = Mapping[str, RunHistory]
_Shown = TypeVar("_Shown")

_SIZE = (4.8, 3.0)
_PHASES = {"sampling_s": "waiting for samples", "training_s": "training", "publish_s": "publishing"}
_SERIES = (
    ("kl", "KL to the reference", "nats per token"),
    ("entropy", "Entropy at commit", "nats"),
    ("clip_ratio/region_mean", "Clipped tokens", "share of tokens"),
    ("frac_reward_zero_std", "Groups without signal", "share of groups"),
    ("tokens_per_s", "Throughput", "tokens per second"),
)
# Paul Tol's bright scheme: told apart by colour-blind readers and in print.
PALETTE = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#888888")
"""Line colours, in order of use."""
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


class Interval(Protocol):
    """A share from 0 to 1 with its confidence interval."""

    @property
    def accuracy(self) -> float:
        """The share."""

    @property
    def interval(self) -> tuple[float, float]:
        """Its 95 % confidence interval."""


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
    yield plot("Reward", note, _series_of("reward", "mean reward of a completion"), runs)
    yield plot("Share correct", note, _series_of("correct", "share of training completions"), runs)
    for name, history in runs.items():
        if any(event.get("reward_parts") for event in history.rounds.values()):
            yield plot(f"Parts of the reward: {name}", "Moving means.", _parts, {name: history})
    for key, title, unit in _SERIES:
        # Not every method has each of them.
        if any(key in event for history in runs.values() for event in history.rounds.values()):
            yield plot(title, note, _series_of(key, unit), runs)
    yield plot("Staleness", "How many versions older than the learner's a completion was.", _staleness, runs)
    for name, history in runs.items():
        if history.rounds:
            yield plot(f"Seconds of a round: {name}", "Moving means, on top of each other.", _seconds, {name: history})


def plot(title: str, note: str, draw: Callable[[Axes, _Shown], None], shown: _Shown) -> Plot:
    """Render what `draw` draws of `shown` as SVG."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    out = io.StringIO()
    # Text stays text, for screen readers and search. A fixed hash salt makes equal plots bit-identical.
    with mpl.rc_context({**_STYLE, "svg.fonttype": "none", "svg.hashsalt": title}):
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
        yield _label(name), history, PALETTE[index % len(PALETTE)]


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
    for name, history, color in _coloured(runs):
        for label, stage in STAGES.items():
            item = history.final(label)
            if item is not None and len(item.schedules) > 1:
                points = [(scored.mean_steps, scored.score) for scored in _fixed(item)]
                points.sort(key=lambda point: point[0])
                ticks |= {round(steps) for steps, _ in points}
                draw_with_bars(axes, points, color=color, fmt=f"o{stage.line}", label=name if label == "rl" else "")
                free = [(scored.mean_steps, scored.score) for scored in _free(item)]
                draw_with_bars(axes, free, color=color, fmt="D", label="", markerfacecolor="white")
    axes.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)


def _fixed(item: Evaluation) -> list[ScheduleScore]:
    """Return the scores of schedules with a fixed number of steps."""
    return [scored for name, scored in item.schedules.items() if name[0].isdigit()]


def _free(item: Evaluation) -> list[ScheduleScore]:
    return [scored for name, scored in item.schedules.items() if not name[0].isdigit()]


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


def _round_numbers(history: RunHistory) -> list[float]:
    """Return the numbers of the rounds, counted from 1."""
    return [float(index + 1) for index in history.rounds]


def _series_of(key: str, unit: str) -> Callable[[Axes, Runs], None]:
    def draw(axes: Axes, runs: Runs) -> None:
        axes.set(xlabel="round", ylabel=unit)
        for name, history, color in _coloured(runs):
            _draw_smooth(axes, _round_numbers(history), history.series(key), color=color, label=name)

    return draw


def _parts(axes: Axes, runs: Runs) -> None:
    axes.set(xlabel="round", ylabel="mean of a completion")
    ((_, history),) = runs.items()
    names = dict.fromkeys(name for event in history.rounds.values() for name in event.get("reward_parts", {}))
    for index, name in enumerate(names):
        values = [float(event.get("reward_parts", {}).get(name, 0.0)) for event in history.rounds.values()]
        axes.plot(_round_numbers(history), smooth(values), color=PALETTE[index % len(PALETTE)], label=_label(name))


def _staleness(axes: Axes, runs: Runs) -> None:
    axes.set(xlabel="round", ylabel="versions")
    for name, history, color in _coloured(runs):
        axes.plot(_round_numbers(history), smooth(history.series("mean_staleness")), color=color, label=f"{name}: mean")
        axes.plot(_round_numbers(history), history.series("max_staleness"), ":", color=color, label=f"{name}: greatest")
    axes.set_ylim(bottom=0)


def _seconds(axes: Axes, runs: Runs) -> None:
    axes.set(xlabel="round", ylabel="s")
    ((_, history),) = runs.items()
    layers = [smooth(history.series(key)) for key in _PHASES]
    axes.stackplot(_round_numbers(history), layers, labels=list(_PHASES.values()), colors=PALETTE, alpha=0.8)
    axes.set_ylim(bottom=0)
