"""Throughput of the maths grader on real generations, with several workers.

    python -m benchmarks.grading math500 ../shared/data/llada-generations/math500_256.jsonl --workers 2

In the first pass every problem is new, as in an evaluation. In the second pass the reference answers are already
parsed, as for all completions of a group after the first.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from pydantic import TypeAdapter

from rewards import TaskConfig, make_task
from rewards.data.sources import rows_of

_PASSES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Throughput and latency of one pass."""

    grades_per_s: float
    """Over all workers."""
    p50_ms: float
    """Median latency of a grade, milliseconds."""
    p99_ms: float
    """99th percentile of the latency, milliseconds."""


def grading(task: str, path: Path, workers: int) -> list[Speed]:
    """Measure each pass over a file whose lines are split evenly among the workers."""
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(workers), context.Queue()
    processes = [
        context.Process(target=_work, args=(task, path, slice(worker, None, workers), barrier, queue), daemon=True)
        for worker in range(workers)
    ]
    for process in processes:
        process.start()
    taken = [queue.get(timeout=600) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    return [_speed([worker[number] for worker in taken]) for number in range(_PASSES)]


def _work(task: str, path: Path, share: slice, barrier: Any, queue: Any) -> None:
    chosen = make_task(TypeAdapter(TaskConfig).validate_python({"name": task}))
    rows = [row.fields for row in rows_of(path)]
    lines = [(chosen.from_ground_truth(row["question"], row["ground_truth"]), row["generation"]) for row in rows[share]]
    # Warm up the grader before the clock starts.
    chosen.grade(chosen.example(), "<answer>\\sqrt{9}</answer>")
    taken = []
    for _ in range(_PASSES):
        barrier.wait(timeout=600)
        seconds = []
        for problem, text in lines:
            began = time.perf_counter()
            chosen.grade(problem, text)
            seconds.append(time.perf_counter() - began)
        taken.append(seconds)
    queue.put(taken)


def _speed(by_worker: list[list[float]]) -> Speed:
    seconds = [one for worker in by_worker for one in worker]
    hundredths = quantiles(seconds, n=100)
    return Speed(
        grades_per_s=len(seconds) / max(map(sum, by_worker)),
        p50_ms=1e3 * hundredths[49],
        p99_ms=1e3 * hundredths[98],
    )


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("file", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    for number, speed in enumerate(grading(arguments.task, arguments.file, arguments.workers), start=1):
        print(
            f"pass {number}: {speed.grades_per_s:,.0f} grades/s, "
            f"median {speed.p50_ms:.3g} ms, 99 of 100 within {speed.p99_ms:.3g} ms"
        )


if __name__ == "__main__":
    _main()
