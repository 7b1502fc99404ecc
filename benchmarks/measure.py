"""Benchmark timing in interleaved rounds, and peak memory in fresh processes."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Ratio:
    """Speed-up over the baseline: median, minimum and maximum of the paired ratios."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def seconds(work: Callable[[], object], device: str) -> float:
    """Time one call: CPU time of this process on a CPU, wall time on a GPU."""
    if device == "cpu":
        began = time.process_time()
        work()
        return time.process_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def in_turn(works: Mapping[str, Callable[[], object]], rounds: int, device: str) -> dict[str, list[float]]:
    """Time each work once per round. Interleaving exposes all of them to the same machine load."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            taken[name].append(seconds(work, device))
    return taken


def ratio(taken: Mapping[str, list[float]], baseline: str, name: str) -> Ratio:
    """Compute the speed-up of `name` over `baseline`, paired by round."""
    pairs = [one / other for one, other in zip(taken[baseline], taken[name], strict=True)]
    return Ratio(statistics.median(pairs), min(pairs), max(pairs))


def in_fresh_process(work: Callable[..., Any], *args: Any) -> Any:
    """Run `work(*args)` in a fresh process on one thread, so that earlier allocations do not affect its heap."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_answer, args=(queue, work, args))
    process.start()
    while True:
        try:
            answer = queue.get(timeout=5)
            break
        except Empty:
            if not process.is_alive():
                raise RuntimeError(f"the process of {work.__name__} died with exit code {process.exitcode}") from None
    process.join()
    return answer


def _answer(queue: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    queue.put(work(*args))


def peak_bytes(work: Callable[..., object], *args: Any) -> int:
    """Measure the growth of peak resident memory that `work(*args)` causes in a fresh, warmed-up process.

    `work` is called twice. Its first argument says whether the call is the warm-up, which should be small.
    """
    return int(in_fresh_process(_peak, work, args))


def _peak(work: Callable[..., object], args: tuple[Any, ...]) -> int:
    work(True, *args)
    # A new process inherits its parent's peak (getrusage's too). Writing 5 here resets it.
    Path("/proc/self/clear_refs").write_text("5")
    before = _high_water_bytes()
    work(False, *args)
    return _high_water_bytes() - before


def _high_water_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
