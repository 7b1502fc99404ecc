"""Prometheus metrics of an ingress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.service.api.policy_view import newest
from deploy.service.contract import EngineState

BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
"""Bounds of the histograms, in seconds."""


class RequestObserver(Protocol):
    """Is told what becomes of requests. A path is one of the application's, or "other"."""

    def num_open_is(self, num_open: int) -> None:
        """So many are under way now."""
        ...

    def first_byte(self, path: str, seconds: float) -> None:
        """An answer's body begins, so long after its request came."""
        ...

    def answered(self, path: str, status: int, seconds: float) -> None:
        """A request has ended; 0 is the status of one that was given no answer."""
        ...


class ServiceMetrics:
    """Counts of one ingress, and how the engines stood when they were last asked."""

    def __init__(self, paths: frozenset[str]) -> None:
        """Count requests by `paths`; all others are one."""
        self._paths = paths
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

    def measured(self, app: ASGIApp, *others: RequestObserver) -> ASGIApp:
        """An application whose requests are counted, here and by `others`."""
        observers, num_open = (self, *others), 0

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal num_open
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
                    for observer in observers:
                        observer.first_byte(path, time.monotonic() - began)
                await send(message)

            num_open += 1
            for observer in observers:
                observer.num_open_is(num_open)
            try:
                await app(scope, receive, counted)
            finally:
                num_open -= 1
                for observer in observers:
                    observer.num_open_is(num_open)
                    observer.answered(path, status, time.monotonic() - began)

        return call

    def num_open_is(self, num_open: int) -> None:
        """As `RequestObserver.num_open_is`."""
        self._open.set(num_open)

    def first_byte(self, path: str, seconds: float) -> None:
        """As `RequestObserver.first_byte`."""
        self._first.labels(path).observe(seconds)

    def answered(self, path: str, status: int, seconds: float) -> None:
        """As `RequestObserver.answered`."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

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
