"""Serve's own texts become error objects; the service's answers pass untouched and unbuffered."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.serve_proxy import PROXY_ENV, middlewares


def ask(app, path="/v1/models", headers=()):
    """What a client is sent by `app` behind the middleware, and the exception that is left."""
    (middleware,) = middlewares()
    scope = {"type": "http", "method": "GET", "path": path, "headers": list(headers)}
    sent = []

    async def send(message):
        sent.append(message)

    async def run():
        await middleware.cls(app)(scope, None, send)

    try:
        asyncio.run(run())
    except RuntimeError as error:
        return sent, error
    return sent, None


def text(status, body, media_type=b"text/plain; charset=utf-8"):
    """An answer as Serve's proxy makes it."""
    return [
        {"type": "http.response.start", "status": status, "headers": [[b"content-type", media_type]]},
        {"type": "http.response.body", "body": body},
    ]


def says(*messages):
    async def app(scope, receive, send):
        for message in messages:
            await send(message)

    return app


def headers_of(sent):
    return {name.decode(): value.decode() for name, value in sent[0]["headers"]}


@pytest.mark.parametrize(
    ("status", "becomes", "code", "kind"),
    [
        (404, 503, "unavailable", "server_error"),
        (408, 503, "timeout", "server_error"),
        (429, 429, "overloaded", "rate_limit_error"),
        (500, 503, "unavailable", "server_error"),
        (503, 503, "unavailable", "server_error"),
    ],
)
def test_serves_texts_become_error_objects(status, becomes, code, kind):
    serves = text(status, b"Path '/v1/models' not found. Ping http://.../-/routes for available routes.")
    sent, _ = ask(says(*serves), headers=[(b"x-request-id", b"one")])
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    error = json.loads(sent[1]["body"])["error"]
    assert (sent[0]["status"], error["code"], error["type"]) == (becomes, code, kind)
    assert "routes" not in error["message"]
    headers = headers_of(sent)
    assert headers["content-type"] == "application/json"
    assert headers["content-length"] == str(len(sent[1]["body"]))
    assert (headers["retry-after"], headers["x-request-id"]) == ("1", "one")


def test_a_process_that_dies_before_it_answers_is_an_error_object():
    sent, _ = ask(says())
    assert (sent[0]["status"], json.loads(sent[1]["body"])["error"]["code"]) == (503, "unavailable")

    async def fails(scope, receive, send):
        raise RuntimeError("a mistake of Serve's")

    sent, error = ask(fails)
    assert sent[0]["status"] == 503
    assert "mistake" not in sent[1]["body"].decode()
    assert "mistake" in str(error), "Serve's log has it"


def test_a_stream_passes_chunk_by_chunk_and_one_that_breaks_stays_broken():
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}
    chunks = [{"type": "http.response.body", "body": bytes([n]), "more_body": True} for n in range(3)]
    sent, _ = ask(says(start, *chunks))
    assert sent[0]["status"] == 200
    assert sent[1:] == chunks


def test_the_services_own_errors_pass_with_one_request_id():
    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"a"), (b"X-Request-ID", b"a")]
    start = {"type": "http.response.start", "status": 404, "headers": headers}
    body = {"type": "http.response.body", "body": b'{"error": {}}'}
    sent, _ = ask(says(start, body))
    assert (sent[0]["status"], sent[1]) == (404, body)
    assert sent[0]["headers"] == headers[:2]


def test_probes_pass_and_what_is_deployed_is_nobodys_business():
    healthy = text(200, b"success")
    assert ask(says(*healthy), "/-/healthz")[0] == healthy
    draining = text(503, b"draining")
    assert ask(says(*draining), "/-/healthz")[0] == draining
    sent, _ = ask(says(*text(200, b'{"/": "d1-secret-run"}', b"application/json")), "/-/routes")
    assert sent[0]["status"] == 404
    assert b"secret" not in sent[1]["body"]


def test_the_image_has_what_a_proxy_needs_in_its_environment():
    image = (Path(__file__).parents[2] / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    for name, value in PROXY_ENV.items():
        assert f"{name}={value}" in image.split()


def test_a_proxy_imports_no_torch_for_it():
    (path,) = PROXY_ENV.values()
    module, _, function = path.rpartition(".")
    code = f"import sys, {module}; assert {module}.{function}(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
