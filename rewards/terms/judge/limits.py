"""Rate limit and cost counters of the judge."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from threading import Lock


class RateLimit:
    """Limits requests to a number per minute, evenly spaced. Thread-safe."""

    def __init__(self, per_minute: float | None) -> None:
        """Set the limit; None disables it."""
        self._interval_s = 0.0 if per_minute is None else 60.0 / per_minute
        self._next = 0.0
        self._lock = Lock()

    def wait(self) -> None:
        """Block until the next request may be sent."""
        with self._lock:
            now = time.monotonic()
            mine = max(self._next, now)
            self._next = mine + self._interval_s
        time.sleep(mine - now)


class Costs:
    """Counters that are reset when they are reported. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    def add(self, **counts: int) -> None:
        """Add to some counters."""
        with self._lock:
            self._counts.update(counts)

    def take(self) -> Mapping[str, float]:
        """Return what was added since the last call."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return {name: float(count) for name, count in taken.items()}
