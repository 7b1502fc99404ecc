"""Prometheus metrics of an ingress."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from deploy.service.api.policy_view import newest
from deploy.service.contract import EngineState

BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
"""Bucket bounds of the histograms, in seconds."""


class ServiceMetrics:
    """Request metrics of one ingress, a `RequestObserver`, and the engines' latest states."""

    def __init__(self, paths: frozenset[str]) -> None:
        """Count requests by `paths`; all other paths are counted together."""
        self.paths = paths
        self._registry = CollectorRegistry()
        self._requests = Counter("d1_requests", "Answers.", ("path", "status"), registry=self._registry)
        self._seconds = Histogram(
            "d1_request_seconds", "To the end of the answer.", ("path",), buckets=BUCKETS_S, registry=self._registry
        )
        self._first = Histogram(
            "d1_first_byte_seconds", "To its first byte.", ("path",), buckets=BUCKETS_S, registry=self._registry
        )
        self._open = Gauge("d1_open_requests", "Requests under way.", registry=self._registry)
        self._version = Gauge("d1_policy_version", "The newest version that serves.", registry=self._registry)
        self._swaps = Gauge("d1_policy_swaps", "Swaps of each engine.", ("replica",), registry=self._registry)
        self._running = Gauge("d1_choices_running", "Being denoised.", ("replica",), registry=self._registry)
        self._waiting = Gauge("d1_choices_waiting", "Without a slot.", ("replica",), registry=self._registry)

    def num_open_is(self, num_open: int) -> None:
        """See `RequestObserver.num_open_is`."""
        self._open.set(num_open)

    def first_byte(self, path: str, seconds: float) -> None:
        """See `RequestObserver.first_byte`."""
        self._first.labels(path).observe(seconds)

    def answered(self, path: str, status: int, seconds: float) -> None:
        """See `RequestObserver.answered`."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def text(self, states: Sequence[EngineState]) -> bytes:
        """Return all metrics in Prometheus's text format."""
        if states:
            self._version.set(newest(states).policy.version)
        for gauge in (self._swaps, self._running, self._waiting):
            # Engines come and go.
            gauge.clear()
        for state in states:
            self._swaps.labels(state.replica).set(state.num_swaps)
            self._running.labels(state.replica).set(state.num_running)
            self._waiting.labels(state.replica).set(state.num_waiting)
        return generate_latest(self._registry)
