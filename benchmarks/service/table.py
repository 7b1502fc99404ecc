"""Output of the service benchmarks: terminal tables and JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def percentile(values: Sequence[float], share: float) -> float:
    """Compute a percentile: the smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def times(values: Sequence[float]) -> dict[str, float]:
    """Compute p50 and p99, in milliseconds, of times in seconds."""
    return {"p50_ms": 1e3 * statistics.median(values), "p99_ms": 1e3 * percentile(values, 0.99)}


def machine() -> dict[str, Any]:
    """Describe the machine and the time of the measurement."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "cpu": model.partition(": ")[2] or platform.processor(),
        "num_cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print a table whose columns are the keys of the first row."""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for line in cells:
        words = [word.ljust(width) for word, width in zip(line, widths, strict=True)]
        print("  " + "  ".join(words).rstrip(), flush=True)


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def verdict(what: str, value: float, limit: str, *, is_met: bool) -> dict[str, Any]:
    """Format a measurement with its limit."""
    return {"measure": what, "measured": round(value, 3), "limit": limit, "met": "yes" if is_met else "NO"}


def save(path: Path | None, result: dict[str, Any]) -> None:
    """Write the result as JSON, if there is a path."""
    if path is not None:
        path.write_text(json.dumps(result | {"machine": machine()}, indent=2) + "\n")
        print(f"\nwritten to {path}")
