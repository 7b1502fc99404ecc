"""Registry events as an ingress streams them: ordered, resumable, and robust to outages."""

import asyncio
import json
import time
from contextlib import aclosing, suppress
from dataclasses import replace

import pytest
import redis
from starlette.testclient import TestClient

from actors.registry.records import AdminState
from actors.registry.registry import Registry
from deploy.service.api.app import create_app
from deploy.service.api.policy_events import RegistryReader, one_event


@pytest.fixture
def make_reader():
    """Create readers, one per ingress."""
    made = []

    def make(registry):
        made.append(RegistryReader(registry))
        return made[-1]

    yield make
    for reader in made:
        reader.close()


def never():
    return False


def events_in(frames):
    """Return id, kind and body of each event. Comments are left out."""
    lines = [frame.decode().split("\n") for frame in frames if frame.startswith(b"id: ")]
    return [(id_[4:], kind[7:], json.loads(data[6:])) for id_, kind, data, *_ in lines]


def hear(stream, count, timeout_s=10.0):
    """Return the first `count` frames of a stream, or those that arrived in time."""

    async def listen():
        heard = []
        async with aclosing(stream):
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while len(heard) < count:
                        heard.append(await anext(stream))
        return heard

    return asyncio.run(listen())


def test_past_events_are_sent_and_continue_after_last_event_id(registry, make_reader, make_policy):
    registry.announce(make_policy(2))
    registry.serve(2, expected=None)
    registry.set_admin(AdminState(pinned=2, is_paused=True, why="it adds well", changed_at=1.0))
    heard = events_in(hear(make_reader(registry).events(None, never), 5))
    assert [(kind, body["version"], body["round"], body["why"]) for _, kind, body in heard] == [
        ("published", 2, 1, None),
        ("serving", 2, 1, None),
        ("pinned", 2, 1, "it adds well"),
        ("paused", None, None, "it adds well"),
    ]
    assert all(body["time_s"] > 1e9 for _, _, body in heard)
    assert [id_ for id_, _, _ in heard] == [event.id for event in registry.events("0")]
    again = events_in(hear(make_reader(registry).events(heard[1][0], never), 3))
    assert again == heard[2:]


def test_new_events_are_sent_to_open_streams(registry, make_reader, make_policy, monkeypatch):
    monkeypatch.setattr("deploy.service.api.policy_events._POLL_S", 0.01)

    async def listen():
        async with aclosing(make_reader(registry).events(None, never)) as stream:
            assert await anext(stream) == b": d1\n\n"
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            await asyncio.to_thread(registry.announce, make_policy(2))
            return await asyncio.wait_for(waiting, 10)

    assert [kind for _, kind, _ in events_in([asyncio.run(listen())])] == ["published"]


@pytest.mark.parametrize("last_id", ["", "x", "3f2a-1", "99999999999999999999-0", "9999999999999-0", "1-2-3"])
def test_an_unknown_last_event_id_gets_the_latest_events(registry, make_reader, make_policy, last_id):
    registry.announce(make_policy(2))
    assert [kind for _, kind, _ in events_in(hear(make_reader(registry).events(last_id, never), 2))] == ["published"]


def test_an_unreadable_entry_is_skipped(registry, registry_server, make_reader, make_policy):
    registry.announce(make_policy(2))
    (first,) = registry.events("0")
    with redis.Redis.from_url(registry_server.url) as client:
        client.xadd(registry._events, {"json": "garbage"})
    registry.announce(make_policy(3))
    for last_id in (None, first.id):
        heard = events_in(hear(make_reader(registry).events(last_id, never), 2))
        assert [body["version"] for _, _, body in heard] == [3]


def test_an_unreachable_registry_is_reported_and_retried(registry, make_reader, make_policy, monkeypatch):
    monkeypatch.setattr("deploy.service.api.policy_events._POLL_S", 0.01)
    monkeypatch.setattr("deploy.service.api.policy_events._RETRY_S", 0.05)
    monkeypatch.setattr("deploy.service.api.policy_events.PING_S", 0.1)
    away = Registry("redis://:none@127.0.0.1:1/0", "tiny")

    async def listen():
        reader = make_reader(away)
        async with aclosing(reader.events(None, never)) as stream:
            heard = [await asyncio.wait_for(anext(stream), 20) for _ in range(2)]
            reader._registry = registry
            registry.announce(make_policy(2))
            while not heard[-1].startswith(b"id: "):
                heard.append(await asyncio.wait_for(anext(stream), 20))
        return heard

    heard = asyncio.run(listen())
    assert heard[1] == b": the registry cannot be reached\n\n"
    assert [kind for _, kind, _ in events_in(heard)] == ["published"]
    away.close()


def test_the_only_event_of_a_single_checkpoint_is_sent_once(make_policy):
    heard = events_in(hear(one_event(make_policy(3), None, never), 2))
    assert [(kind, body["version"]) for _, kind, body in heard] == [("serving", 3)]
    assert hear(one_event(make_policy(3), heard[0][0], never), 2, timeout_s=0.2) == [b": d1\n\n"]


def test_a_version_that_only_the_registry_knows_is_shown(service, registry, make_reader, make_policy):
    registry.announce(make_policy(9, num_correct=3, num_problems=4))
    with TestClient(create_app(replace(service, registry=make_reader(registry)))) as client:
        body = client.get("/v1/policy/9").json()
        assert (body["policy_version"], body["round"], body["score"]["accuracy"]) == (9, 8, 0.75)
        assert (body["is_live"], body["is_serving"]) == (False, False)
        assert client.get("/v1/policy/1").json()["is_serving"]
        assert client.get("/v1/policy/10").status_code == 404
        assert client.get("/v1/models/policy@v000009").json()["policy_version"] == 9
        assert client.get("/v1/models/policy@v000010").status_code == 404
    away = Registry("redis://:none@127.0.0.1:1/0", "tiny")
    with TestClient(create_app(replace(service, registry=make_reader(away)))) as client:
        assert client.get("/v1/policy/1").status_code == 200
        assert client.get("/v1/models/policy@v000010").status_code == 503
        refused = client.get("/v1/policy/10")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    away.close()


def test_a_checkpoint_is_shown_while_the_registry_is_unreachable(service, make_reader, run_dir, add_checkpoint):
    add_checkpoint(run_dir, 2)
    away = Registry("redis://:none@127.0.0.1:1/0", "tiny")
    with TestClient(create_app(replace(service, registry=make_reader(away)))) as client:
        assert client.get("/v1/policy/2").json()["phase"] == "rl"
        assert client.get("/v1/models/policy@v000002").json()["policy_version"] == 2
    away.close()


def test_event_streams_end_when_their_ingress_drains(registry, make_reader, make_policy):
    async def listen(events):
        async with asyncio.timeout(10):
            return [event async for event in events]

    for events in (make_reader(registry).events, lambda *rest: one_event(make_policy(3), *rest)):
        over_s = time.monotonic() + 0.2
        heard = asyncio.run(listen(events(None, lambda over_s=over_s: time.monotonic() > over_s)))
        assert heard[0] == b": d1\n\n"
