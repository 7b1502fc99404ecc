"""Tables of the transport benchmark, with the decision rule."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.service.scripted_engine import NUM_EVENTS, OURS
from benchmarks.service.table import percentile, show, verdict

_MOST_LATENCY_MS, _MOST_CPU_MS = 1.5, 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Load pattern of jobs."""

    num_clients: int
    """Closed-loop clients: each sends its next job after an answer."""
    pause_us: int
    """Pause between two events of a job, microseconds."""

    @property
    def name(self) -> str:
        """Label in the tables."""
        pauses = f", {self.pause_us / 1e3:g} ms between events" if self.pause_us else ""
        return f"{self.num_clients} client{'s' * (self.num_clients > 1)}{pauses}"


@dataclass(slots=True)
class Series:
    """One transport under one load, over all rounds."""

    latencies_s: list[list[float]] = field(default_factory=list)
    """Latencies of the jobs of each round."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds per job in each round, both processes together."""

    @property
    def medians_s(self) -> list[float]:
        """Return the median latency of each round."""
        return [statistics.median(latencies) for latencies in self.latencies_s]

    def row(self, load: Load, name: str, ours: Series) -> dict[str, Any]:
        """Format for the table."""
        every = [latency for latencies in self.latencies_s for latency in latencies]
        return {
            "load": load.name,
            "transport": name,
            "jobs": len(every),
            **_quantiles(every),
            "CPU ms": 1e3 * statistics.median(self.cpu_s),
            "p50 / own": _ratio(self.medians_s, ours.medians_s),
            "CPU / own": _ratio(self.cpu_s, ours.cpu_s),
        }


@dataclass(slots=True)
class Found:
    """All measurements."""

    jobs: dict[Load, dict[str, Series]]
    """Measurements by load and transport. The first load is the deciding one."""
    left_s: dict[str, list[float]]
    """Seconds from a client's disconnect to the end of its job in the engine, by transport."""
    messages_cpu_s: list[float]
    """CPU time to serialise and deserialise the messages of a job, in each round."""
    loops: list[tuple[float, float]]
    """Wall and CPU seconds of a plain loop, in each round."""

    def report(self) -> dict[str, Any]:
        """Print the results. Returns them for JSON."""
        rows = [one.row(load, name, of[OURS]) for load, of in self.jobs.items() for name, one in of.items()]
        show(f"a job of {NUM_EVENTS} events", rows)
        ended = [{"transport": name, "n": len(some), **_quantiles(some)} for name, some in self.left_s.items()]
        show("from a client's leaving to the end of its job in the engine", ended)
        checks = _checks([row for row in rows if row["load"] == next(iter(self.jobs)).name])
        show("what would decide for gRPC, 1 client", checks)
        messages_ms = 1e3 * statistics.median(self.messages_cpu_s)
        loop_s, loop_cpu_s = (statistics.median(column) for column in zip(*self.loops, strict=True))
        print(f"\n  a job's messages to bytes and back: {messages_ms:.2f} ms of CPU time")
        print(f"  a plain loop of ten million steps: {loop_s:.2f} s, {loop_cpu_s:.2f} s of CPU time")
        facts = {"messages_cpu_ms": messages_ms, "loop_s": loop_s, "loop_cpu_s": loop_cpu_s}
        return {"rows": rows, "cancellation": ended, "checks": checks, **facts}


def _checks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        verdict(f"{row['transport']}, {key}", row[key], f"< {limit}", is_met=row[key] < limit)
        for row in rows
        if row["transport"] != OURS
        for key, limit in (("p50_ms", _MOST_LATENCY_MS), ("CPU ms", _MOST_CPU_MS))
    ]


def _quantiles(seconds: list[float]) -> dict[str, float]:
    return {"p50_ms": 1e3 * percentile(seconds, 0.5), "p95_ms": 1e3 * percentile(seconds, 0.95)}


def _ratio(values: list[float], ours: list[float]) -> float:
    """Compute the median of the per-round ratios."""
    return statistics.median(a / b for a, b in zip(values, ours, strict=True))
