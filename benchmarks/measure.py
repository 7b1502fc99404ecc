"""Timing in turn, and peak memory in a process of its own."""

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
    """How many times faster than the baseline: the median of paired ratios, and the least and the greatest."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def seconds(work: Callable[[], object], device: str) -> float:
    """Time of one call: of this process on a CPU, by the clock on a GPU."""
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
    """Seconds of each work in each round; all works take their turn in every round."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            taken[name].append(seconds(work, device))
    return taken


def ratio(taken: Mapping[str, list[float]], baseline: str, name: str) -> Ratio:
    """How many times faster `name` was than `baseline`."""
    pairs = [one / other for one, other in zip(taken[baseline], taken[name], strict=True)]
    return Ratio(statistics.median(pairs), min(pairs), max(pairs))


def in_fresh_process(work: Callable[..., Any], *args: Any) -> Any:
    """What `work(*args)` returns in a process of its own, on one thread, whose heap nothing else has shaped."""
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
    """By how much `work(*args)` raises the largest size of a fresh process that has imported and called it once.

    `work` is called twice with a first argument that says whether it is the warm-up, which should be small.
    """
    return int(in_fresh_process(_peak, work, args))


def _peak(work: Callable[..., object], args: tuple[Any, ...]) -> int:
    work(True, *args)
    # A new process begins with its parent's peak (getrusage's too): Linux forgets it when asked.
    Path("/proc/self/clear_refs").write_text("5")
    before = _high_water_bytes()
    work(False, *args)
    return _high_water_bytes() - before


def _high_water_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
