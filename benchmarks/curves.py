"""Plots of the sampler benchmark (`benchmarks/sampler.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLUMNS = {
    "axis": "axis",
    "value": "value",
    "ratio_T0": "times as fast, T=0",
    "ratio_T0.9": "times as fast, T=0.9",
    "peak_bytes_reference": "peak bytes of a step, reference",
    "peak_bytes_d1": "peak bytes of a step, d1",
}
_AXES = {"batch": "rows of the batch", "gen_length": "completion slots", "vocab_size": "vocabulary"}
# Paul Tol's bright scheme: distinguishable for colour-blind readers and in print.
_BLUE, _RED, _GREY = "#4477AA", "#EE6677", "#888888"


def draw(results: dict[str, Any], path: Path) -> None:
    """Plot the available `results`: ratios and memory over each axis, speed and accuracy of the caches."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    swept, cached = results.get("curves", []), results.get("caches", [])
    if not swept and not cached:
        return
    figure, axes = plt.subplots(3 if swept and cached else 2 if swept else 1, 3, figsize=(12, 9 if cached else 6))
    grid = axes.reshape(-1, 3)
    if swept:
        for column, (axis, label) in enumerate(_AXES.items()):
            rows = [row for row in swept if row["axis"] == axis]
            _ratios(grid[0, column], rows, label)
            _memory(grid[1, column], rows, label)
    if cached:
        _costs(grid[-1], cached)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _ratios(axes: Any, rows: list[dict[str, Any]], label: str) -> None:
    for key, colour, name in (("ratio_T0", _BLUE, "T = 0"), ("ratio_T0.9", _RED, "T = 0.9")):
        values = [row[key] for row in rows]
        low = [value.median - value.low for value in values]
        high = [value.high - value.median for value in values]
        xs = [row["value"] for row in rows]
        axes.errorbar(xs, [value.median for value in values], (low, high), color=colour, marker="o", label=name)
    axes.axhline(1, color=_GREY, linewidth=1)
    axes.set(xscale="log", xlabel=label, ylabel="times as fast as the reference", ylim=(0, None))
    axes.set_xticks([row["value"] for row in rows], [f"{row['value']:,}" for row in rows])
    axes.minorticks_off()
    axes.legend()


def _memory(axes: Any, rows: list[dict[str, Any]], label: str) -> None:
    if "peak_bytes_d1" not in rows[0]:
        return
    for key, colour, name in (("peak_bytes_reference", _GREY, "reference"), ("peak_bytes_d1", _BLUE, "d1")):
        axes.plot(
            [row["value"] for row in rows], [row[key] / 1e6 for row in rows], color=colour, marker="o", label=name
        )
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="peak memory of a step, MB")
    axes.set_xticks([row["value"] for row in rows], [f"{row['value']:,}" for row in rows])
    axes.minorticks_off()
    axes.legend()


def _costs(axes: Any, rows: list[dict[str, Any]]) -> None:
    names = [row["sampler"] for row in rows]
    panels = (
        ("times as fast as exact quota", [row["ratio"].median for row in rows]),
        ("mean |Δ log-prob| of a token at T = 1, nats", [row["mismatch_mean"] for row in rows]),
        ("accuracy at T = 0", [row["accuracy"] for row in rows]),
    )
    for index, (panel, (title, values)) in enumerate(zip(axes, panels, strict=True)):
        panel.barh(names, values, color=_BLUE)
        panel.invert_yaxis()
        panel.set_title(title, fontsize=9)
        if index:
            panel.set_yticklabels([])
