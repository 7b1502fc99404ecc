"""Throughput of reading and hashing files, counted over threads and reported once a second."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

ReportProgress = Callable[[str], object]
"""Callback for progress messages such as `loading sft: 4.1 of 16.0 GB, 2.1 GB/s`."""

MAX_THREADS = 8
"""More threads do not read faster from one disk, and several processes of a machine read at the same time."""
_EVERY_S = 1.0


def num_threads() -> int:
    """Return the number of threads that read or hash files in this process."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


class Throughput:
    """Thread-safe byte counter that reports once a second, and nothing in the first second."""

    def __init__(self, what: str, num_bytes: int, report: ReportProgress | None = None) -> None:
        """Start counting towards `num_bytes` of the task `what`; without `report` nothing is reported."""
        self._what, self._all, self._report = what, num_bytes, report
        self._began = self._reported_at = time.monotonic()
        self._lock = threading.Lock()
        self.num_bytes = 0
        """Bytes done so far."""

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def add(self, num_bytes: int) -> None:
        """Count bytes that are done, and report if a second has passed."""
        with self._lock:
            self.num_bytes += num_bytes
            if self._report is not None and time.monotonic() - self._reported_at >= _EVERY_S:
                self._reported_at = time.monotonic()
                self._report(str(self))

    def __str__(self) -> str:
        done, whole, rate = (number / 1e9 for number in (self.num_bytes, self._all, self.num_bytes / self.seconds))
        return f"{self._what}: {done:.1f} of {whole:.1f} GB, {rate:.1f} GB/s"
