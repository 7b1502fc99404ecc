"""The HTTP application around a plain engine, behind its gate."""

import pytest

from actors.registry.records import AdminState
from deploy.service.api.app import create_app, guarded
from deploy.service.contract import FollowerStatus
from deploy.service.gateway.api_keys import ApiKeys
from deploy.service.gateway.rate_limits import RateLimits
from tests.deploy.service.app.asking import BEARER, OTHER, TOKEN

WANTED = AdminState(pinned=1, is_paused=True)
STATUS = FollowerStatus(registry_reachable=True, num_errors=2, last_error="it was away", admin=WANTED)


@pytest.fixture
def app(service, host):
    host._follower_status = lambda: STATUS
    return create_app(service)


@pytest.fixture
def make_client(app, open_client):
    """Clients of the application behind its gate."""

    def make(rate="1000000/second", headers=BEARER):
        return open_client(guarded(app, ApiKeys.of(f"me:{TOKEN}\nyou:{OTHER}", "test"), RateLimits(rate)), headers)

    return make


@pytest.fixture
def client(make_client):
    return make_client()
