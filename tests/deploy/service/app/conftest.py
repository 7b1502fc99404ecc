"""Fixtures: the HTTP application with a plain engine, behind authentication and rate limits."""

from types import SimpleNamespace

import pytest

from actors.registry.records import AdminState
from deploy.service.api.app import create_app, guarded
from deploy.service.contract import FollowerStatus
from deploy.service.engine.engine import Engine
from deploy.service.engine.engine_host import EngineHost
from deploy.service.gateway.keys import ApiKeys, RateLimits
from deploy.service.source import Source
from tests.deploy.service.app.asking import BEARER, OTHER, TOKEN

WANTED = AdminState(pinned=1, is_paused=True)
STATUS = FollowerStatus(registry_reachable=True, num_errors=2, last_error="it was away", admin=WANTED)


@pytest.fixture
def app(service, host):
    host._follower = SimpleNamespace(status=STATUS)
    return create_app(service)


@pytest.fixture
def make_client(app, open_client):
    """Create clients of the application behind authentication and rate limits."""

    def make(rate="1000000/second", headers=BEARER):
        return open_client(guarded(app, ApiKeys.of(f"me:{TOKEN}\nyou:{OTHER}", "test"), RateLimits(rate)), headers)

    return make


@pytest.fixture
def client(make_client):
    return make_client()


@pytest.fixture
def serve(open_client):
    """Serve a single checkpoint as `d1 serve` does, but without Ray. Returns the service and a client."""
    engines = []

    def serve_one(directory):
        source = Source(directory=str(directory), is_run=False, registry_url=None)
        versions = source.versions("cpu")
        engines.append(Engine(versions))
        service = source.service(EngineHost(versions, engines[-1]))
        inside = guarded(create_app(service), ApiKeys.of(TOKEN, "test"), RateLimits("1000000/second"))
        return service, open_client(inside, BEARER)

    yield serve_one
    for engine in engines:
        engine.close()
