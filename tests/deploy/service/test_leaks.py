"""Memory leaks: no object of a finished request stays in the application or in the engine."""

import asyncio
import gc
from contextlib import suppress
from itertools import cycle, islice

import httpx
import pytest

from benchmarks.service.deployment import KEY, Policies, Shape
from benchmarks.service.load import Client, mixed_asks
from deploy.service.api.app import create_app, guarded
from deploy.service.engine.engine import Engine
from deploy.service.engine.engine_host import EngineHost
from deploy.service.gateway.keys import ApiKeys, RateLimits
from deploy.service.source import Source

NUM_REQUESTS = 96
# Less than one per request: pool threads and cache entries appear now and then.
MOST_OBJECTS = NUM_REQUESTS // 2
BAD = ({"prompt": "2", "no_such": 1}, {"prompt": "9 " * 900}, {"prompt": "2", "model": "policy@v999"})


@pytest.fixture
def policies(tmp_path):
    return Policies(tmp_path / "run", Shape(d_model=32, num_layers=1, gen_length=16, block_length=4, steps=4), 1)


@pytest.fixture
def application(policies):
    source = Source(directory=str(policies.directory), is_run=True, registry_url=None)
    versions = source.versions("cpu")
    engine = Engine(versions)
    service = source.service(EngineHost(versions, engine))
    yield guarded(create_app(service), ApiKeys.of(KEY, "test"), RateLimits("1000000/second"))
    engine.close()


async def load(client, asks):
    """Send completions, hang-ups and bad requests."""
    answers = await asyncio.gather(*(client.ask(ask) for ask in asks))
    assert [answer.failure for answer in answers if answer.failure] == []
    for ask in asks[:8]:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.005):
                await client.http.post(ask.path, json=ask.sent)
    for body in BAD:
        assert (await client.http.post("/v1/completions", json=body)).status_code in {400, 404}
    # When one more is answered, the abandoned requests have ended.
    assert not (await client.ask(asks[0])).failure


def num_objects():
    gc.collect()
    return len(gc.get_objects())


def test_nothing_of_a_request_stays_in_memory(application, policies):
    async def grown():
        client = Client("http://service")
        await client.aclose()
        transport = httpx.ASGITransport(app=application)
        client.http = httpx.AsyncClient(
            transport=transport, base_url="http://service", headers={"Authorization": f"Bearer {KEY}"}
        )
        asks = list(islice(cycle(mixed_asks(policies, 32, 0)), NUM_REQUESTS // 2))
        await load(client, asks)
        await load(client, asks)
        before = num_objects()
        await load(client, asks)
        await load(client, asks)
        after = num_objects()
        await client.aclose()
        return after - before

    assert asyncio.run(grown()) < MOST_OBJECTS
