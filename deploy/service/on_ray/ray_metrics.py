"""Ray metrics of the service: `ray_d1_*` on each node's Prometheus endpoint."""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge, Histogram

from deploy.service.api.metrics import BUCKETS_S

# Ray Serve's own labels, so that one selection on a dashboard applies to all metrics.
_APPLICATION, _REPLICA = "application", "replica"
_COUNTERS = {"requests": "Answers"}
_HISTOGRAMS = {
    "request_seconds": "Seconds to the end of an answer",
    "first_byte_seconds": "Seconds to the first byte of an answer's body",
}
_GAUGES = {"open_requests": "Requests in progress"}
_ENGINE_GAUGES = {
    "choices_running": "Choices being denoised",
    "choices_waiting": "Choices waiting for a slot",
    "policy_swaps": "Version swaps of the engine",
    # The version that a run published is `ray_d1_policy_version`.
    "serving_policy_version": "Policy version that the engine serves",
}


class RequestMetrics:
    """Request metrics of an ingress, a `RequestObserver`."""

    def __init__(self, application: str) -> None:
        """Create the metrics of a Ray Serve application."""
        self._requests = Counter("d1_requests", _COUNTERS["requests"], (_APPLICATION, "path", "status"))
        self._seconds, self._first_byte = _histogram("request_seconds"), _histogram("first_byte_seconds")
        self._open = Gauge("d1_open_requests", _GAUGES["open_requests"], (_APPLICATION,))
        for metric in (self._requests, self._seconds, self._first_byte, self._open):
            metric.set_default_tags({_APPLICATION: application})

    def num_open_is(self, num_open: int) -> None:
        """See `RequestObserver`."""
        self._open.set(num_open)

    def first_byte(self, path: str, seconds: float) -> None:
        """See `RequestObserver`."""
        self._first_byte.observe(seconds, {"path": path})

    def answered(self, path: str, status: int, seconds: float) -> None:
        """See `RequestObserver`."""
        self._requests.inc(tags={"path": path, "status": str(status)})
        self._seconds.observe(seconds, {"path": path})


class EngineMetrics:
    """Metrics of an engine."""

    def __init__(self, application: str, replica: str) -> None:
        """Create the metrics of a replica of a Ray Serve application."""
        self._gauges = {
            name: Gauge(f"d1_{name}", text, (_APPLICATION, _REPLICA)) for name, text in _ENGINE_GAUGES.items()
        }
        for gauge in self._gauges.values():
            gauge.set_default_tags({_APPLICATION: application, _REPLICA: replica})

    def show(self, *, num_running: int, num_waiting: int, num_swaps: int, version: int) -> None:
        """Set every gauge."""
        self._gauges["choices_running"].set(num_running)
        self._gauges["choices_waiting"].set(num_waiting)
        self._gauges["policy_swaps"].set(num_swaps)
        self._gauges["serving_policy_version"].set(version)


def _histogram(name: str) -> Histogram:
    return Histogram(f"d1_{name}", _HISTOGRAMS[name], list(BUCKETS_S), (_APPLICATION, "path"))
