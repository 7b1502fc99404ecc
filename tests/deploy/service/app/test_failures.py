"""Failures: what clients see, and what the metrics count."""

import asyncio
import json
import time
from dataclasses import replace

from starlette.testclient import TestClient

from deploy.service.api.app import create_app, guarded
from deploy.service.engine.engine import Engine
from deploy.service.gateway.keys import ApiKeys, RateLimits
from tests.deploy.service.app.asking import ASK, BEARER, CHAT, TOKEN, assert_error, events_of
from tests.deploy.service.asking import wait_until


def test_an_internal_error_reveals_nothing_to_the_client(client, engine, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("secret /path")

    monkeypatch.setattr(engine, "submit", fail)
    response = client.post("/v1/completions", json=ASK)
    assert assert_error(response, 500)["type"] == "server_error"
    assert "secret" not in response.text


def test_excess_requests_get_openais_rate_limit_error(client, engine, app, service):
    engine._max_pending = 2
    response = client.post("/v1/completions", json=ASK | {"n": 3})
    assert assert_error(response, 429, "overloaded")["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "1"
    streamed = client.post("/v1/completions", json=ASK | {"n": 3, "stream": True})
    assert_error(streamed, 429, "overloaded")
    app.state.inference.places.num = service.max_open
    assert_error(client.post("/v1/completions", json=ASK), 429, "overloaded")
    app.state.inference.places.num = 0
    assert client.post("/v1/completions", json=ASK).status_code == 200
    assert app.state.inference.places.num == 0


def test_event_streams_beyond_the_limit_are_refused(client, app, service):
    app.state.listeners.num = service.max_listeners
    refused = client.get("/v1/policy/events")
    assert_error(refused, 429, "overloaded")
    assert refused.headers["retry-after"] == "5"
    app.state.listeners.num = 0


def test_a_draining_service_answers_503(client, app):
    assert client.get("/health/ready").json()["status"] == "ready"
    app.state.inference.is_draining = True
    for response in (client.post("/v1/completions", json=ASK), client.get("/health/ready")):
        assert_error(response, 503)
        assert response.headers["retry-after"]
    assert client.get("/health").status_code == 200


def test_a_request_cancelled_before_its_stream_begins_frees_its_place(service):
    """As Serve cancels it when the client disconnects."""
    begun = asyncio.Event()

    class Silent:
        async def stream(self, job):
            begun.set()
            await asyncio.sleep(60)
            yield []

    app = create_app(replace(service, backend=Silent()))
    body = json.dumps(CHAT | {"stream": True}).encode()
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": headers}

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        pass

    async def ask():
        request = asyncio.create_task(app(scope, receive, send))
        await asyncio.wait_for(begun.wait(), 10)
        assert app.state.inference.places.num == 1
        request.cancel()
        await asyncio.wait((request,), timeout=10)

    asyncio.run(ask())
    assert app.state.inference.places.num == 0


def test_a_broken_stream_ends_with_an_error_and_without_done(mortal_service):
    app = create_app(mortal_service)
    inside = guarded(app, ApiKeys.of(TOKEN, "test"), RateLimits("1000/second"))
    with TestClient(inside, headers=BEARER) as client:
        chunks, is_done = events_of(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
        assert not is_done
        assert chunks[-1]["error"]["code"] == "engine_unavailable"
        assert all("error" not in chunk for chunk in chunks[:-1])
        assert len(chunks) > 1
        assert_error(client.post("/v1/completions", json=ASK), 503, "engine_unavailable")
    assert app.state.inference.places.num == 0


def test_a_request_that_takes_too_long_gets_503(client, service, monkeypatch):
    service.planner._timeout_s = 0.2
    step = Engine._step
    monkeypatch.setattr(Engine, "_step", lambda self, live: time.sleep(0.3) or step(self, live))
    response = client.post("/v1/completions", json=ASK)
    assert_error(response, 503, "timeout")
    assert response.headers["retry-after"] == "1"


def test_metrics_are_in_prometheus_format(client):
    client.post("/v1/completions", json=ASK)
    client.get("/v1/nothing/at/all")
    # The engines are polled for their metrics a few times a second.
    idle = 'd1_choices_running{replica="local"} 0.0'
    wait_until(lambda: idle in client.get("/metrics").text, "the engine to be idle")
    text = client.get("/metrics").text
    assert 'd1_requests_total{path="/v1/completions",status="200"} 1.0' in text
    assert 'd1_requests_total{path="other",status="404"} 1.0' in text
    assert "d1_policy_version 1.0" in text


def test_requests_refused_by_access_control_are_counted(make_client):
    make_client(headers={}).get("/v1/models")
    busy = make_client("1/day")
    assert [busy.get("/v1/models").status_code for _ in range(2)] == [200, 429]
    text = make_client().get("/metrics").text
    for status in (200, 401, 429):
        assert f'd1_requests_total{{path="/v1/models",status="{status}"}} 1.0' in text
