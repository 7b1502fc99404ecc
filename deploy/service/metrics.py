"""What Prometheus reads of an ingress."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.service.messages import EngineState
from deploy.service.policy_view import newest

_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ServiceMetrics:
    """Counts of one ingress, and how the engines stood when they were last asked."""

    def __init__(self, paths: frozenset[str]) -> None:
        """Count requests by `paths`; all others are one."""
        self._paths = paths
        self._registry = CollectorRegistry()
        self._requests = Counter("d1_requests", "Answers.", ("path", "status"), registry=self._registry)
        self._seconds = Histogram(
            "d1_request_seconds", "To the end of the answer.", ("path",), buckets=_BUCKETS_S, registry=self._registry
        )
        self._first = Histogram(
            "d1_first_byte_seconds", "To its first byte.", ("path",), buckets=_BUCKETS_S, registry=self._registry
        )
        self._open = Gauge("d1_open_requests", "Requests under way.", registry=self._registry)
        self._version = Gauge("d1_policy_version", "The newest version that serves.", registry=self._registry)
        self._swaps = Gauge("d1_policy_swaps", "Swaps of each engine.", ("replica",), registry=self._registry)
        self._running = Gauge("d1_choices_running", "Being denoised.", ("replica",), registry=self._registry)
        self._waiting = Gauge("d1_choices_waiting", "Without a slot.", ("replica",), registry=self._registry)

    def measured(self, app: ASGIApp) -> ASGIApp:
        """An application whose requests are counted."""

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            began, status, is_first = time.monotonic(), 0, True
            path = scope["path"] if scope["path"] in self._paths else "other"

            async def counted(message: Message) -> None:
                nonlocal status, is_first
                if message["type"] == "http.response.start":
                    status = message["status"]
                elif is_first:
                    is_first = False
                    self._first.labels(path).observe(time.monotonic() - began)
                await send(message)

            self._open.inc()
            try:
                await app(scope, receive, counted)
            finally:
                self._open.dec()
                self._requests.labels(path, str(status)).inc()
                self._seconds.labels(path).observe(time.monotonic() - began)

        return call

    def text(self, states: Sequence[EngineState]) -> bytes:
        """In Prometheus's format."""
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
