"""Under which names the service may be asked, and by whose pages."""

import pytest
from pydantic import TypeAdapter, ValidationError

from deploy.recipe.recipe import Hostname, Origin
from deploy.service.api.app import guarded
from deploy.service.gateway.access import Callers
from deploy.service.gateway.keys import ApiKeys, RateLimits
from tests.deploy.service.app.asking import BEARER, TOKEN

ELSEWHERE = "https://notes.example.org"


@pytest.fixture
def make_client(service, open_client):
    from deploy.service.api.app import create_app

    def make(callers):
        gated = guarded(create_app(service), ApiKeys.of(TOKEN, "test"), RateLimits("1000/second"), callers=callers)
        return open_client(gated, BEARER)

    return make


@pytest.mark.parametrize(
    ("listens_on", "allowed", "asked", "is_known"),
    [
        ("127.0.0.1", (), "127.0.0.1:8000", True),
        ("127.0.0.1", (), "localhost:9000", True),
        ("127.0.0.1", (), "LocalHost.:9000", True),
        ("::1", (), "[::1]:8000", True),
        ("127.0.0.1", (), "10.1.2.3", True),
        ("127.0.0.1", (), "evil.example.org:8000", False),
        ("127.0.0.1", (), "127.0.0.1.example.org", False),
        ("127.0.0.1", (), "", False),
        ("127.0.0.1", ("d1.example.org",), "d1.example.org", True),
        ("127.0.0.1", ("d1.example.org",), "evil.example.org", False),
        ("0.0.0.0", (), "whatever.example.org", True),
        ("0.0.0.0", ("d1.example.org",), "d1.example.org:443", True),
        ("0.0.0.0", ("d1.example.org",), "evil.example.org", False),
        ("0.0.0.0", ("d1.example.org",), "10.1.2.3:8000", True),
    ],
)
def test_an_unknown_host_is_refused(make_client, listens_on, allowed, asked, is_known):
    """Also for what takes no key: the page of an origin that resolves to this machine would be the service's own."""
    client = make_client(Callers.of(listens_on, allowed, ()))
    for path in ("/health", "/", "/v1/models"):
        answer = client.get(path, headers={"host": asked})
        assert answer.status_code == (200 if is_known else 421), path
    if not is_known:
        assert answer.json()["error"]["code"] == "unknown_host"
        assert "service.allowed_hosts" in answer.json()["error"]["message"]


def test_other_origins_need_permission_to_read_answers(make_client):
    asks = {"origin": ELSEWHERE, "access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "authorization,content-type"
    closed, opened = make_client(Callers()), make_client(Callers.of("127.0.0.1", (), (ELSEWHERE,)))
    opened.headers["host"] = "localhost"
    assert "access-control-allow-origin" not in closed.get("/v1/models", headers=asks).headers
    assert closed.options("/v1/chat/completions", headers=asks).status_code == 405
    before = opened.options("/v1/chat/completions", headers=asks)
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == ELSEWHERE
    # A refusal too is for the page to read.
    for path, key, status in (("/v1/models", BEARER, 200), ("/v1/models", {"authorization": "Bearer no"}, 401)):
        answer = opened.get(path, headers={"origin": ELSEWHERE} | key)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, ELSEWHERE)
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    other = opened.get("/v1/models", headers={"origin": "https://evil.example.org"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("text", ["https://a.example", "http://127.0.0.1:3000", "*"])
def test_valid_origins_are_accepted(text):
    assert TypeAdapter(Origin).validate_python(text) == text


@pytest.mark.parametrize(
    "text", ["a.example", "https://a.example/", "https://a.example/x", "ftp://a", "https://", "", "http://["]
)
def test_invalid_origins_are_refused(text):
    with pytest.raises(ValidationError, match="must be an origin"):
        TypeAdapter(Origin).validate_python(text)


@pytest.mark.parametrize("text", ["https://a.example", "a.example:8000", "A.example", "-a", ""])
def test_invalid_host_names_are_refused(text):
    with pytest.raises(ValidationError):
        TypeAdapter(Hostname).validate_python(text)


@pytest.mark.parametrize(
    ("headers", "said"),
    [({}, "has no Content-Type"), ({"content-type": "text/plain"}, "has another Content-Type")],
)
def test_a_body_without_json_content_type_is_refused(make_client, headers, said):
    client = make_client(Callers())
    answer = client.post("/v1/chat/completions", content=b'{"messages": []}', headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == f"The request {said}; send JSON with the header `Content-Type: application/json`."
    assert error["code"] == "invalid_content_type"
