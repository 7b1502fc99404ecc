"""Training curves of a run as one PNG: reward, accuracy, loss, clipping, KL and seconds per round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from actors.run_log import VALIDATION, Event
from deploy.printing import printable
from deploy.runs.history import Evaluation, RunHistory, moving_mean, read_history
from rollout.score import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Panel = Callable[["Axes", RunHistory], None]

# Paul Tol's bright scheme: told apart by colour-blind readers and in print.
_BLUE, _RED, _GREEN, _YELLOW, _CYAN, _PURPLE, _GREY = (
    "#4477AA",
    "#EE6677",
    "#228833",
    "#CCBB44",
    "#66CCEE",
    "#AA3377",
    "#888888",
)
PALETTE = (_BLUE, _RED, _GREEN, _YELLOW, _CYAN, _PURPLE, _GREY)
"""Line colours, in order of use."""
_STAGES = {
    "untrained": (_GREY, "untrained"),
    "start": (_GREY, "start"),
    "sft": (_BLUE, "SFT"),
    "round": (_RED, "after a round"),
    VALIDATION: (_GREY, "validation"),
    "rl": (_RED, "RL"),
    "control": (_GREEN, "control"),
}
_COLUMNS = 3
STYLE: dict[Any, Any] = {
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
"""Matplotlib settings of all plots."""


class Interval(Protocol):
    """A share from 0 to 1 with its confidence interval."""

    @property
    def accuracy(self) -> float:
        """The share."""

    @property
    def interval(self) -> tuple[float, float]:
        """Its 95 % confidence interval."""


def draw_curves(events: Iterable[Event], path: Path) -> None:
    """Draw a panel for each curve that has data; if none has, write nothing."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    history = read_history(events)
    panels = list(_panels(history))
    if not panels:
        return
    rows = -(-len(panels) // _COLUMNS)
    columns = min(_COLUMNS, len(panels))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * columns, 2.9 * rows + 0.3), layout="constrained")
        FigureCanvasAgg(figure)
        title = {"x": 0.01, "ha": "left", "fontsize": 12, "fontweight": "bold"}
        # A run's name must not be parsed as mathtext.
        figure.suptitle(printable(history.name), parse_math=False, **title)
        for index, draw in enumerate(panels):
            draw(figure.add_subplot(rows, columns, index + 1), history)
        save(figure, path)


def _panels(history: RunHistory) -> Iterable[_Panel]:
    if history.rounds:
        yield _reward
    if history.evaluations:
        yield _accuracy
    if any(len(item.schedules) > 1 for item in history.evaluations):
        yield _schedules
    if history.steps:
        yield _sft_loss
    if history.rounds:
        yield _shares
        # Not every method has a KL.
        if any("kl" in event for event in history.rounds.values()):
            yield _kl
        yield _seconds


def draw_smooth(axes: Axes, xs: list[float], values: list[float], color: str, label: str) -> None:
    """Draw the values faintly, and their moving mean over a twentieth of them."""
    axes.plot(xs, values, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(xs, smooth(values), color=color, linewidth=1.8, marker="o" if len(xs) == 1 else None, label=label)


def smooth(values: list[float]) -> list[float]:
    """Return the moving mean of the values over a twentieth of them."""
    return moving_mean(values, max(1, len(values) // 20))


def round_numbers(history: RunHistory) -> list[float]:
    """Return the numbers of the rounds, counted from 1."""
    return [float(index + 1) for index in history.rounds]


def error_bars(scores: Sequence[Interval]) -> tuple[list[float], list[list[float]]]:
    """Return accuracies in percent, and the lengths of their error bars below and above."""
    middles = [100 * score.accuracy for score in scores]
    # The Wilson interval contains the share, except for rounding errors at 0 and 1.
    lows = [max(0.0, 100 * (score.accuracy - score.interval[0])) for score in scores]
    highs = [max(0.0, 100 * (score.interval[1] - score.accuracy)) for score in scores]
    return middles, [lows, highs]


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically, so that no reader sees half of one."""
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=150, format="png")
    partial.replace(path)


def _reward(axes: Axes, history: RunHistory) -> None:
    axes.set(title="Reward on training problems", xlabel="round")
    draw_smooth(axes, round_numbers(history), history.series("reward"), _RED, "reward")
    draw_smooth(axes, round_numbers(history), history.series("correct"), _BLUE, "share correct")
    axes.set_ylim(bottom=min(0.0, *history.series("reward")))
    axes.legend(loc="best")


def _accuracy(axes: Axes, history: RunHistory) -> None:
    axes.set(title="Held-out accuracy, 95 % interval", xlabel="minutes since the start", ylabel="%")
    curve = history.accuracy_curve
    axes.plot([item.drawn_s / 60 for item in curve], [_percent(item.score) for item in curve], color=_GREY, linewidth=1)
    for label, (color, name) in _STAGES.items():
        items = [item for item in history.evaluations if item.label == label]
        if items:
            _points(axes, items, color=color, name=name, is_stage=label not in ("round", VALIDATION))
    axes.margins(x=0.1, y=0.15)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")


def _schedules(axes: Axes, history: RunHistory) -> None:
    """Draw a line for each stage; rings are adaptive schedules, which take as many steps as they need."""
    axes.set(title="Held-out accuracy by denoise steps", xlabel="denoise steps", ylabel="%", xscale="log")
    for label, (color, name) in _STAGES.items():
        item = history.final(label)
        if item is None or len(item.schedules) < 2:
            continue
        found = sorted((scored.mean_steps, _percent(scored.score), key) for key, scored in item.schedules.items())
        fixed = [point for point in found if point[2][0].isdigit()]
        axes.plot([x for x, _, _ in fixed], [y for _, y, _ in fixed], "o-", color=color, markersize=4, label=name)
        free = [point for point in found if point not in fixed]
        axes.plot([x for x, _, _ in free], [y for _, y, _ in free], "o", color=color, markersize=7, markerfacecolor="w")
    ticks = sorted({round(scored.mean_steps) for item in history.evaluations for scored in item.schedules.values()})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")


def _points(axes: Axes, items: list[Evaluation], *, color: str, name: str, is_stage: bool) -> None:
    middles, bars = error_bars([item.score for item in items])
    marks: dict[str, Any] = {"markersize": 7, "capsize": 3} if is_stage else {"markersize": 3, "alpha": 0.6}
    axes.errorbar(
        [item.drawn_s / 60 for item in items],
        middles,
        yerr=bars,
        fmt="o",
        color=color,
        label=name,
        elinewidth=1.2,
        clip_on=False,
        **marks,
    )
    for item in items if is_stage else ():
        place = (item.drawn_s / 60, _percent(item.score))
        axes.annotate(
            f"{_percent(item.score):.1f}", place, (7, 3), textcoords="offset points", color=color, weight="bold"
        )


def _percent(score: Score) -> float:
    return 100 * score.accuracy


def _sft_loss(axes: Axes, history: RunHistory) -> None:
    from matplotlib.ticker import LogLocator

    axes.set(title="SFT loss", xlabel="optimizer step", yscale="log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    for phase, steps in history.steps.items():
        color, name = _STAGES[phase]
        # The control continues from the end of SFT.
        first = history.planned.get("sft", 0) if phase == "control" else 0
        draw_smooth(axes, [first + step["step"] for step in steps], [step["loss"] for step in steps], color, name)
        held_out = history.sft_losses.get(phase, [])
        places, losses = [first + item["step"] for item in held_out], [item["loss"] for item in held_out]
        if held_out:
            axes.plot(places, losses, "o--", color=color, markersize=4, linewidth=1, label=f"{name}, held out")
    axes.legend(loc="best")


def _shares(axes: Axes, history: RunHistory) -> None:
    axes.set(title="Clipped tokens, groups without signal", xlabel="round", ylabel="share")
    draw_smooth(axes, round_numbers(history), history.series("clip_ratio/region_mean"), _PURPLE, "clip fraction")
    draw_smooth(axes, round_numbers(history), history.series("frac_reward_zero_std"), _YELLOW, "zero-variance groups")
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")


def _kl(axes: Axes, history: RunHistory) -> None:
    axes.set(title="KL to the reference", xlabel="round", ylabel="nats per token")
    draw_smooth(axes, round_numbers(history), history.series("kl"), _CYAN, "k3 estimate")
    axes.set_ylim(bottom=0)


def _seconds(axes: Axes, history: RunHistory) -> None:
    axes.set(title="Seconds of a round", xlabel="round", ylabel="s")
    for key, color, label in (
        ("sampling_s", _CYAN, "waiting for samples"),
        ("training_s", _BLUE, "training"),
        ("publish_s", _YELLOW, "publishing"),
    ):
        draw_smooth(axes, round_numbers(history), history.series(key), color, label)
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")
