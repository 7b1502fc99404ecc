"""How often a judge may be asked, and what it has cost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from threading import Lock


class RateLimit:
    """At most so many requests a minute, evenly spaced. Used by several threads."""

    def __init__(self, per_minute: float | None) -> None:
        """None is no limit."""
        self._interval_s = 0.0 if per_minute is None else 60.0 / per_minute
        self._next = 0.0
        self._lock = Lock()

    def wait(self) -> None:
        """Return when the next request may be sent."""
        with self._lock:
            now = time.monotonic()
            mine = max(self._next, now)
            self._next = mine + self._interval_s
        time.sleep(mine - now)


class Costs:
    """Counts that are taken away as they are reported. Used by several threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    def add(self, **counts: int) -> None:
        """Add to some counts."""
        with self._lock:
            self._counts.update(counts)

    def take(self) -> Mapping[str, float]:
        """What was added since the last call."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return {name: float(count) for name, count in taken.items()}
