"""Tests of the HTTP reward term, against a real server that misbehaves."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from rewards import RewardUnavailableError, Sample
from rewards.terms import endpoint
from rewards.terms.http_term import HttpConfig, HttpTerm
from rewards.terms.term import NoValue
from tests.rewards.conftest import Reply, Server


def _values(*values: Any) -> Reply:
    return Reply(body=json.dumps({"values": values}).encode())


def _term(server: Server, **fields: Any) -> HttpTerm:
    return HttpTerm(HttpConfig(url=f"{server.url}/grade?v=1", **fields))


def test_samples_are_posted_in_batches_and_values_keep_their_order(
    server: Server, sample: Callable[..., Sample]
) -> None:
    server.answer = lambda body: _values(*(len(item["completion"]) for item in body["samples"]))
    values = _term(server, batch_size=4, max_concurrency=3).values([sample("x" * n) for n in range(10)])
    assert values == [float(n) for n in range(10)]
    assert sorted(len(asked.body["samples"]) for asked in server.asked) == [2, 4, 4]
    asked = next(asked for asked in server.asked if asked.body["samples"][0]["completion"] == "")
    assert asked.body["samples"][0] == sample("").reward_arguments()
    assert asked.path == "/grade?v=1"
    assert asked.headers["content-type"] == "application/json"
    assert "authorization" not in asked.headers


def test_concurrent_requests_are_limited(server: Server, sample: Callable[..., Sample]) -> None:
    server.answer = lambda body: Reply(body=b'{"values": [1]}', delay_s=0.05)
    _term(server, batch_size=1, max_concurrency=3).values([sample()] * 12)
    assert server.most_at_once == 3


def test_a_token_comes_from_the_environment(
    server: Server, sample: Callable[..., Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = lambda body: _values(1)
    config = HttpConfig(url=server.url, token_env="D1_TEST_TOKEN")
    with pytest.raises(ValueError, match="the environment variable D1_TEST_TOKEN is not set"):
        config.check()
    monkeypatch.setenv("D1_TEST_TOKEN", "s3cret")
    config.check()
    term = HttpTerm(config)
    term.values([sample()])
    assert server.asked[0].headers["authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(term._endpoint)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"<html>", "JSONDecodeError"),
        (b"[" * 100_000, "RecursionError"),
        (b"\xff\xfe\x00", "UnicodeDecodeError"),
        (b"[]", "TypeError"),
        (b'{"value": [1, 2]}', "KeyError: 'values'"),
        (b'{"values": [1]}', "with 2 values; values is a list of 1"),
        (b'{"values": "ab"}', "values is no list"),
    ],
)
def test_an_undocumented_response_gives_no_value(
    body: bytes, sentence: str, server: Server, sample: Callable[..., Sample]
) -> None:
    server.answer = lambda _: Reply(body=body)
    for value in _term(server).values([sample(), sample()]):
        assert isinstance(value, NoValue)
        assert sentence in value.detail
    assert len(server.asked) == 1


def test_an_invalid_value_affects_its_sample_only(server: Server, sample: Callable[..., Sample]) -> None:
    server.replies = [Reply(body=b'{"values": [1, null, NaN, "2", 0.5]}')]
    first, null, nan, text, last = _term(server).values([sample()] * 5)
    assert (first, last) == (1.0, 0.5)
    for value, sentence in ((null, "gave no value"), (nan, "gave nan"), (text, "gave '2'")):
        assert isinstance(value, NoValue)
        assert sentence in value.detail


@pytest.mark.parametrize("headers", [{}, {"Content-Length": str(2**40)}])
def test_a_huge_response_is_not_read(headers: dict[str, str], server: Server, sample: Callable[..., Sample]) -> None:
    server.answer = lambda _: Reply(body=b" " * 3_000_000, headers=headers)
    (value,) = _term(server).values([sample()])
    assert isinstance(value, NoValue)
    assert value.detail.endswith("answered with more than 1000000 bytes")


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_request_gives_no_value(status: int, server: Server, sample: Callable[..., Sample]) -> None:
    server.replies = [Reply(status=status)]
    (value,) = _term(server).values([sample()])
    assert isinstance(value, NoValue)
    assert value.detail == f"{server.url}/grade?v=1 answered {status}"


@pytest.mark.usefixtures("fast_retries")
def test_transient_failures_are_retried(server: Server, sample: Callable[..., Sample]) -> None:
    server.replies = [Reply(status=500), Reply(status=503, body=b"x" * 100_000)]
    server.answer = lambda _: _values(1)
    assert _term(server, num_tries=3).values([sample()]) == [1.0]
    assert len(server.asked) == 3


def test_retry_after_is_honored(server: Server, sample: Callable[..., Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(endpoint, "time", SimpleNamespace(sleep=slept.append))
    server.replies = [Reply(status=429, headers={"Retry-After": "1.3"}), _values(1)]
    assert _term(server).values([sample()]) == [1.0]
    assert slept == [1.3]


def test_a_long_retry_after_pauses_the_run(server: Server, sample: Callable[..., Sample]) -> None:
    server.answer = lambda _: Reply(status=429, headers={"Retry-After": "3600"})
    with pytest.raises(RewardUnavailableError, match="does not answer: status 429, after 1 try"):
        _term(server).values([sample()])


@pytest.mark.usefixtures("fast_retries")
@pytest.mark.parametrize(
    ("reply", "timeout_s", "sentence"),
    [
        (Reply(status=500), 60.0, "status 500, after 3 tries"),
        (Reply(delay_s=5.0), 0.3, "timed out, after 3 tries"),
        (Reply(body=b" " * 300, drip_s=0.05), 0.3, r"(timed out|took too long), after 3 tries"),
        (
            Reply(body=b"x", headers={"Content-Length": "10"}),
            60.0,
            r"IncompleteRead\(1 bytes read, 9 more expected\), after 3 tries",
        ),
    ],
)
def test_a_silent_server_pauses_the_run(
    reply: Reply, timeout_s: float, sentence: str, server: Server, sample: Callable[..., Sample]
) -> None:
    server.answer = lambda _: reply
    began = time.monotonic()
    with pytest.raises(RewardUnavailableError, match=sentence):
        _term(server, timeout_s=timeout_s).values([sample()])
    assert time.monotonic() - began < 10
    # An abandoned attempt may reach the server late.
    deadline = time.monotonic() + 60
    while len(server.asked) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(server.asked) == 3


def test_no_batch_is_posted_after_a_failed_one(server: Server, sample: Callable[..., Sample]) -> None:
    server.answer = lambda _: Reply(delay_s=2.0)
    term = _term(server, timeout_s=0.5, num_tries=1, max_concurrency=2, batch_size=1)
    with pytest.raises(RewardUnavailableError, match="timed out, after 1 try"):
        term.values([sample()] * 20)
    assert len(server.asked) <= 2


@pytest.mark.usefixtures("fast_retries")
def test_an_unreachable_server_pauses_the_run(sample: Callable[..., Sample]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        with pytest.raises(RewardUnavailableError, match=rf"{url} does not answer: .*refused, after 3 tries"):
            HttpTerm(HttpConfig(url=url)).values([sample()])


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(status: int, server: Server, sample: Callable[..., Sample]) -> None:
    elsewhere = Server()
    try:
        server.answer = lambda _: Reply(status=status, headers={"Location": f"{elsewhere.url}/metadata"})
        with pytest.raises(RewardUnavailableError, match=f"status {status}, a redirect to .* which is not followed"):
            _term(server).values([sample()])
        assert elsewhere.asked == []
    finally:
        elsewhere.close()


def test_proxies_of_the_environment_are_not_used(
    server: Server, sample: Callable[..., Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = lambda _: _values(1)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert _term(server).values([sample()]) == [1.0]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refused_token_pauses_the_run(status: int, server: Server, sample: Callable[..., Sample]) -> None:
    server.answer = lambda _: Reply(status=status)
    with pytest.raises(RewardUnavailableError, match=f"refuses to answer: status {status}$"):
        _term(server).values([sample()])
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("ftp://host/", "should begin with http:// or https://"),
        ("file:///etc/passwd", "should begin with http:// or https://"),
        ("localhost:8000/grade", "should begin with http:// or https://"),
        ("http:///grade", "and name a host"),
        ("http://host:99999/", "is no URL"),
        ("http://user:hidden@host/", "has a user or a password in it; name an environment variable"),
        ("http://user@host/", "has a user or a password in it"),
        ("http://host/a b", "without spaces"),
        ("http://host/\r\nX: y", "without spaces"),
        ("http://host/#part", "nothing after a #"),
    ],
)
def test_only_plain_urls_are_accepted(url: str, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence) as refusal:
        HttpConfig(url=url)
    assert "hidden" not in refusal.value.errors()[0]["msg"]
