"""What is told to Ray's metrics. Ray itself is not started: what would go to its core is kept here."""

from dataclasses import dataclass, field

import pytest
import ray.util.metrics
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

import deploy.service.gateway.access
from deploy.service.api.metrics import BUCKETS_S, ServiceMetrics
from deploy.service.gateway.access import AccessControl
from deploy.service.gateway.keys import ApiKeys, RateLimits
from deploy.service.on_ray.ray_metrics import EngineMetrics, RequestMetrics
from tests.deploy.service.asking import TOKEN

OF_TINY = {"application": "d1-tiny"}


@dataclass
class Core:
    """Ray's core, as far as metrics know it."""

    bounds: dict = field(default_factory=dict)
    records: list = field(default_factory=list)
    """Name, value and labels."""

    def metric(self, name, _text, *args):
        if len(args) == 2:
            self.bounds[name] = tuple(args[0])
        return _Metric(name, self)

    def of(self, name):
        return [(value, labels) for recorded, value, labels in self.records if recorded == name]


@dataclass
class _Metric:
    name: str
    core: Core

    def record(self, value, tags):
        self.core.records.append((self.name, value, tags))


@pytest.fixture
def core(monkeypatch):
    core = Core()
    for name in ("CythonCount", "CythonSum", "CythonGauge", "CythonHistogram"):
        monkeypatch.setattr(ray.util.metrics, name, core.metric)
    return core


async def _plain(_request):
    return PlainTextResponse("yes")


async def _slow(request):
    async def parts():
        request.app.state.clock.now_s += 2
        yield "a"
        request.app.state.clock.now_s += 5
        yield "b"

    return StreamingResponse(parts())


async def _broken(_request):
    raise ValueError("no answer")


@dataclass
class Clock:
    now_s: float = 100.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def client(core, monkeypatch):
    """A client of an application with two paths of its own and one that fails."""
    routes = [Route("/plain", _plain), Route("/slow", _slow), Route("/broken", _broken)]
    metrics = ServiceMetrics(frozenset(("/plain", "/slow", "/broken")))
    app = Starlette(routes=routes)
    app.state.clock = Clock()
    monkeypatch.setattr(deploy.service.gateway.access, "time", app.state.clock)
    keys, observers = ApiKeys.of(TOKEN, "test"), (metrics, RequestMetrics("d1-tiny"))
    observed = AccessControl(app, keys, RateLimits("1000/second"), observers=observers, paths=metrics.paths)
    with TestClient(observed, headers={"authorization": f"Bearer {TOKEN}"}, raise_server_exceptions=False) as client:
        client.own = lambda: metrics.text([]).decode()
        yield client


def test_each_answer_is_counted_once_by_ray_and_once_by_prometheus(client, core):
    for path in ("/plain", "/plain", "/broken", "/nobody/knows", "/nor/this"):
        client.get(path)
    assert core.of("d1_requests") == [
        (1.0, OF_TINY | {"path": "/plain", "status": "200"}),
        (1.0, OF_TINY | {"path": "/plain", "status": "200"}),
        (1.0, OF_TINY | {"path": "/broken", "status": "500"}),
        (1.0, OF_TINY | {"path": "other", "status": "404"}),
        (1.0, OF_TINY | {"path": "other", "status": "404"}),
    ]
    for path, status, count in (("/plain", 200, 2), ("/broken", 500, 1), ("other", 404, 2)):
        assert f'd1_requests_total{{path="{path}",status="{status}"}} {count}.0' in client.own()


def test_first_byte_and_total_time_are_measured_separately(client, core):
    client.get("/slow")
    labels = OF_TINY | {"path": "/slow"}
    assert core.of("d1_first_byte_seconds") == [(2.0, labels)]
    assert core.of("d1_request_seconds") == [(7.0, labels)]


def test_histograms_use_the_same_buckets_as_prometheus(client, core):
    assert core.bounds == {"d1_request_seconds": BUCKETS_S, "d1_first_byte_seconds": BUCKETS_S}


def test_open_requests_are_counted_up_and_down(client, core):
    client.get("/plain")
    client.get("/broken")
    assert core.of("d1_open_requests") == [(num_open, OF_TINY) for num_open in (1, 0, 1, 0)]


def test_engine_metrics_are_recorded_with_application_and_replica(core):
    EngineMetrics("d1-tiny", "first").show(num_running=3, num_waiting=2, num_swaps=5, version=7)
    labels = OF_TINY | {"replica": "first"}
    assert core.records == [
        ("d1_choices_running", 3, labels),
        ("d1_choices_waiting", 2, labels),
        ("d1_policy_swaps", 5, labels),
        ("d1_serving_policy_version", 7, labels),
    ]
