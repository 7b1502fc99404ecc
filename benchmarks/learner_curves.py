"""Plots of the learner benchmark (`benchmarks/learner.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLUMNS = {
    "axis": "axis",
    "value": "value",
    "ratio_p0.15": "times as fast, p 0.15",
    "arithmetic_p0.15": "products",
    "ratio_p0": "times as fast, p 0",
    "arithmetic_p0": "products",
    "peak_bytes_reference": "peak bytes, a mask at a time",
    "peak_bytes_d1_p0.15": "d1, p 0.15",
    "peak_bytes_d1_p0": "d1, p 0",
}
_AXES = {"vocab_size": "vocabulary", "gen_length": "completion slots"}
# Paul Tol's bright scheme: distinguishable for colour-blind readers and in print.
_BLUE, _RED, _GREY, _GRID = "#4477AA", "#EE6677", "#888888", "#DDDDDD"
_MASKS = (("p0.15", _BLUE, "d1, prompt masks 0.15"), ("p0", _RED, "d1, no prompt masks"))


def draw(results: dict[str, Any], path: Path) -> None:
    """Plot ratios and peak memory over each axis, if `results` contains them."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    swept = results.get("curves", [])
    if not swept:
        return
    has_memory = "peak_bytes_reference" in swept[0]
    figure, grid = plt.subplots(1 + has_memory, 2, figsize=(9, 3.4 + 3.1 * has_memory), sharey="row", squeeze=False)
    for column, (axis, label) in enumerate(_AXES.items()):
        rows = [row for row in swept if row["axis"] == axis]
        _ratios(grid[0, column], rows)
        if has_memory:
            _memory(grid[1, column], rows)
        for axes in grid[:, column]:
            xs = [row["value"] for row in rows]
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(xs, [f"{x:,}" for x in xs], minor=False)
            axes.set_xticks([], minor=True)
            axes.grid(axis="y", which="both", color=_GRID)
            axes.spines[["top", "right"]].set_visible(False)
        grid[-1, column].set_xlabel(label)
    _plain_ticks(grid[0, 0], "times as fast as the reference")
    if has_memory:
        _plain_ticks(grid[1, 0], "peak memory of a round, MB")
    # One legend for all plots: inside the axes it would cover the curves.
    handles, labels = grid[-1, 0].get_legend_handles_labels()
    more = [pair for pair in zip(*grid[0, 0].get_legend_handles_labels(), strict=True) if pair[1] not in labels]
    handles, labels = handles + [handle for handle, _ in more], labels + [name for _, name in more]
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _ratios(axes: Any, rows: list[dict[str, Any]]) -> None:
    xs = [row["value"] for row in rows]
    for key, colour, name in _MASKS:
        values = [row[f"ratio_{key}"] for row in rows]
        low = [value.median - value.low for value in values]
        high = [value.high - value.median for value in values]
        medians = [value.median for value in values]
        axes.errorbar(xs, medians, (low, high), color=colour, marker="o", capsize=3, label=name)
        axes.plot(xs, [row[f"arithmetic_{key}"] for row in rows], color=colour, linestyle=":")
    axes.plot([], [], color=_GREY, linestyle=":", label="ratio of the products")
    axes.axhline(1, color=_GREY, linewidth=1)


def _memory(axes: Any, rows: list[dict[str, Any]]) -> None:
    xs = [row["value"] for row in rows]
    axes.plot(xs, [row["peak_bytes_reference"] / 1e6 for row in rows], color=_GREY, marker="o", label="reference")
    for key, colour, name in _MASKS:
        axes.plot(xs, [row[f"peak_bytes_d1_{key}"] / 1e6 for row in rows], color=colour, marker="o", label=name)


def _plain_ticks(axes: Any, label: str) -> None:
    """Place ticks at 1, 2, 5, 10, 20, ...: by default, less than a decade gets at most one tick."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

    axes.set_ylabel(label)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
