"""Request ids: the client's own, or a new one, in the logs."""

import pytest
import structlog
from structlog.contextvars import merge_contextvars

from tests.deploy.service.app.asking import ASK, CHAT


@pytest.fixture
def logged():
    with structlog.testing.capture_logs([merge_contextvars]) as lines:
        yield lines


@pytest.mark.parametrize(("sent", "request_id"), [("mine-1", "mine-1"), ("no id", None), (None, None)])
def test_the_log_line_of_an_answer_has_the_request_id(client, logged, sent, request_id):
    client.post("/v1/completions", json=ASK, headers={} if sent is None else {"x-request-id": sent})
    line = next(line for line in logged if line["event"] == "request")
    assert line.pop("seconds") >= 0
    found = line.pop("request_id")
    assert found == request_id or (request_id is None and len(found) == 32)
    assert line == {
        "event": "request",
        "log_level": "info",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
    }


def test_refusals_and_streams_are_logged_and_health_is_not(client, logged):
    client.get("/health")
    client.post("/v1/completions", json=ASK, headers={"authorization": "Bearer no"})
    client.get("/v1/nowhere%1b[2J")
    client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    lines = [(line["path"], line["status"]) for line in logged if line["event"] == "request"]
    assert lines == [("/v1/completions", 401), ("/v1/nowhere\\u001b[2J", 404), ("/v1/chat/completions", 200)]


def test_an_engine_failure_is_logged_with_the_request_ids(client, logged, monkeypatch):
    def broken(batch):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("rollout.sampler.SlotBatch.step", broken)
    response = client.post("/v1/completions", json=ASK, headers={"x-request-id": "mine-3"})
    assert response.status_code == 500
    line = next(line for line in logged if line["event"] == "engine_step_failed")
    assert line["request_ids"] == ["mine-3"]
