"""How often a key may ask: alone, together with other ingresses, and while what they share is away.

Limits are by the day: at the turn of a window what was counted in the one before begins to fade, and a test should not
meet it.
"""

import asyncio
import secrets
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from redis import Redis
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from deploy.service.gateway.access import AccessControl
from deploy.service.gateway.keys import ApiKeys, RateLimits, SharedCounts
from tests.deploy.service.asking import TOKEN, wait_until


def statuses(rates, count, owner="me"):
    """What becomes of requests, one after another, of each of `rates` in turn."""

    async def ask():
        found = []
        for index in range(count):
            refusal = await rates[index % len(rates)].refusal(owner)
            found.append(200 if refusal is None else refusal.status)
        for one in rates:
            await one.aclose()
        return found

    return asyncio.run(ask())


@pytest.fixture
def make_rates(registry_server, monkeypatch):
    """Rates of ingresses of one service, which wait for the count however busy this machine is."""
    monkeypatch.setattr("deploy.service.gateway.keys._TIMEOUT_S", 60.0)
    name = secrets.token_hex(4)
    return lambda limit: RateLimits(limit, SharedCounts(registry_server.url, name))


def test_each_key_has_its_own_limit():
    rates = [RateLimits("2/day")]
    assert statuses(rates, 3) == [200, 200, 429]
    assert statuses(rates, 1, "you") == [200]


def test_ingresses_without_shared_counts_count_separately():
    assert statuses([RateLimits("2/day"), RateLimits("2/day")], 6) == [200, 200, 200, 200, 429, 429]


def test_ingresses_count_together(make_rates):
    assert statuses([make_rates("3/day"), make_rates("3/day")], 5) == [200, 200, 200, 429, 429]


def test_services_do_not_count_together(registry_server, monkeypatch):
    monkeypatch.setattr("deploy.service.gateway.keys._TIMEOUT_S", 60.0)
    rates = [RateLimits("1/day", SharedCounts(registry_server.url, name)) for name in ("one", "other")]
    assert statuses(rates, 3) == [200, 200, 429]


def test_a_rate_limit_error_has_retry_after(make_rates):
    async def refused():
        rates = make_rates("1/day")
        await rates.refusal("me")
        refusal = await rates.refusal("me")
        await rates.aclose()
        return refusal

    assert 1 <= asyncio.run(refused()).retry_after_s <= 60


def test_concurrent_requests_are_all_counted(make_rates):
    async def ask():
        rates = make_rates("5/day")
        found = await asyncio.gather(*(rates.refusal("me") for _ in range(200)))
        await rates.aclose()
        return found

    assert sum(refusal is None for refusal in asyncio.run(ask())) == 5


def test_connections_to_redis_close_with_access_control(registry_server, make_rates):
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("hello"), methods=["POST"])])
    with Redis.from_url(registry_server.url) as redis:
        num_before = len(redis.client_list())
        with TestClient(AccessControl(app, ApiKeys.of(TOKEN, "test"), make_rates("1/day"))) as client:
            client.headers["authorization"] = f"Bearer {TOKEN}"
            assert [client.post("/").status_code for _ in range(2)] == [200, 429]
            assert len(redis.client_list()) == num_before + 1
        wait_until(lambda: len(redis.client_list()) == num_before, "the connections to end")


@contextmanager
def redis_that_says_nothing():
    """Its URL, and the connections that it got."""
    accepted = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept():
            with suppress(OSError):
                while True:
                    accepted.append(listening.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield f"redis://:none@127.0.0.1:{listening.getsockname()[1]}/0", accepted
        listening.shutdown(socket.SHUT_RDWR)
    for connection in accepted:
        connection.close()


def test_without_redis_each_ingress_counts_separately(monkeypatch):
    monkeypatch.setattr("deploy.service.gateway.keys._RETRY_S", 600.0)
    monkeypatch.setattr("deploy.service.gateway.keys._TIMEOUT_S", 1.0)

    async def ask(rates):
        began_s = time.monotonic()
        first = await asyncio.gather(*(rates.refusal("me") for _ in range(20)))
        assert sum(refusal is None for refusal in first) == 2
        assert time.monotonic() - began_s < 15.0, "each waited for the one before"
        num_tried = len(tries)
        # It is not tried for each request.
        assert all([await rates.refusal("me") for _ in range(20)])
        assert len(tries) == num_tried
        # And by one alone, once it may be back.
        rates._away_until = 0.0
        assert all(await asyncio.gather(*(rates.refusal("me") for _ in range(20))))
        assert len(tries) == num_tried + 1
        await rates.aclose()

    with redis_that_says_nothing() as (url, _):
        shared, tries = SharedCounts(url, "tiny"), []
        hit = shared.limiter.hit

        async def tried(*arguments):
            tries.append(arguments)
            return await hit(*arguments)

        monkeypatch.setattr(shared.limiter, "hit", tried)
        asyncio.run(ask(RateLimits("2/day", shared)))
