"""The picture of benchmarks/learner.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLUMNS = {
    "axis": "axis",
    "value": "value",
    "ratio_p0.15": "times as fast, p 0.15",
    "arithmetic_p0.15": "arithmetic allows",
    "ratio_p0": "times as fast, p 0",
    "arithmetic_p0": "arithmetic allows",
    "peak_bytes_reference": "peak bytes, a mask at a time",
    "peak_bytes_d1_p0.15": "d1, p 0.15",
    "peak_bytes_d1_p0": "d1, p 0",
}
_AXES = {"vocab_size": "vocabulary", "gen_length": "completion slots"}
# Paul Tol's bright scheme: told apart by colour-blind readers and in print.
_BLUE, _RED, _GREY = "#4477AA", "#EE6677", "#888888"
_MASKS = (("p0.15", _BLUE, "d1, prompt masks 0.15"), ("p0", _RED, "d1, no prompt masks"))


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw ratios and peak memory over each axis, where `results` has them."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    swept = results.get("curves", [])
    if not swept:
        return
    figure, grid = plt.subplots(2, 2, figsize=(9, 6.5))
    for column, (axis, label) in enumerate(_AXES.items()):
        rows = [row for row in swept if row["axis"] == axis]
        _ratios(grid[0, column], rows, label)
        _memory(grid[1, column], rows, label)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _ratios(axes: Any, rows: list[dict[str, Any]], label: str) -> None:
    xs = [row["value"] for row in rows]
    for key, colour, name in _MASKS:
        values = [row[f"ratio_{key}"] for row in rows]
        low = [value.median - value.low for value in values]
        high = [value.high - value.median for value in values]
        axes.errorbar(xs, [value.median for value in values], (low, high), color=colour, marker="o", label=name)
        allowed = [row[f"arithmetic_{key}"] for row in rows]
        axes.plot(xs, allowed, color=colour, linestyle=":", label="what the arithmetic allows")
    axes.axhline(1, color=_GREY, linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="times as fast as the reference")
    _ticks(axes, xs)


def _memory(axes: Any, rows: list[dict[str, Any]], label: str) -> None:
    if "peak_bytes_reference" not in rows[0]:
        return
    xs = [row["value"] for row in rows]
    axes.plot(xs, [row["peak_bytes_reference"] / 1e6 for row in rows], color=_GREY, marker="o", label="reference")
    for key, colour, name in _MASKS:
        axes.plot(xs, [row[f"peak_bytes_d1_{key}"] / 1e6 for row in rows], color=colour, marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="peak memory of a round, MB")
    _ticks(axes, xs)


def _ticks(axes: Any, xs: list[int]) -> None:
    axes.set_xticks(xs, [f"{x:,}" for x in xs])
    axes.minorticks_off()
    axes.legend(fontsize=8)
