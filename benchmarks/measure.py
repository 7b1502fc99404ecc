"""Timing in turn, and peak memory in a process of its own."""

from __future__ import annotations

import ctypes
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


def keep_freed_memory() -> None:
    """Let glibc keep what is freed (mallopt: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD); elsewhere do nothing.

    Page faults take up to a quarter of the time of what makes large tensors: of the reference more than of d1.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(-3, 32 * 1024 * 1024)
    mallopt(-1, 2**31 - 1)


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


def peak_bytes(work: Callable[..., object], *args: Any) -> int:
    """By how much `work(*args)` raises the largest size of a fresh process that has imported and called it once.

    `work` is called twice with a first argument that says whether it is the warm-up, which should be small.
    """
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_measure, args=(queue, work, args))
    process.start()
    peak = int(queue.get(timeout=600))
    process.join()
    return peak


def _measure(queue: Any, work: Callable[..., object], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    work(True, *args)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work(False, *args)
    queue.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
