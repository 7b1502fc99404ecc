"""The HTTP server itself, asked by sockets that do not keep the rules."""

import asyncio
import io
import json
import logging
import logging.handlers
import socket
import threading
import time
from contextlib import closing

import pytest
from starlette.responses import PlainTextResponse

from deploy.service.gateway.access import AccessControl, RateLimits
from deploy.service.gateway.address import Address
from deploy.service.gateway.api_keys import ApiKeys
from deploy.service.gateway.http_server import HttpServer
from tests.deploy.service.asking import TOKEN, wait_until

GET = b"GET / HTTP/1.1\r\nhost: d1\r\n\r\n"
_WAIT_S = 10.0


async def hello(scope, receive, send):
    await PlainTextResponse("hello")(scope, receive, send)


@pytest.fixture
def serve(free_port):
    """Serve an application, and open connections to it."""
    servers = []

    def serve(app):
        for server in servers:
            server.end(20)
        servers.append(HttpServer(app, Address(host="127.0.0.1", port=free_port), end_within_s=1))
        return lambda: closing(socket.create_connection(("127.0.0.1", free_port), timeout=_WAIT_S))

    serve.servers = servers
    yield serve
    for server in servers:
        server.end(20)


def all_of(connection):
    """What comes until the other side closes."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def refusal(answer):
    """Status and message of an answer that is a refusal."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def test_a_kept_connection_is_asked_again(serve):
    with serve(hello)() as connection:
        for _ in range(2):
            connection.sendall(GET)
            assert connection.recv(65536).endswith(b"hello")


def test_headers_that_do_not_end_are_refused(serve, monkeypatch):
    monkeypatch.setattr("deploy.service.gateway.http_protocol.HEAD_TIMEOUT_S", 0.3)
    with serve(hello)() as connection:
        connection.sendall(GET)
        assert connection.recv(65536).endswith(b"hello")
        # The second request of a connection is held to the same.
        connection.sendall(GET[:-2])
        assert refusal(all_of(connection)) == (408, "The headers took more than 0 s.")


def test_headers_without_end_are_not_kept(serve):
    with serve(hello)() as connection:
        connection.sendall(GET[:-2] + b"x-long: ")
        connection.sendall(b"a" * 200_000)
        assert refusal(all_of(connection)) == (431, "The headers exceed 65536 bytes.")


POST = b"POST / HTTP/1.1\r\nhost: d1\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("rest", [b"x: " + b"a" * 1000 + b"\r\n", b"3e8\r\n" + b"a" * 1000 + b"\r\n"])
def test_what_follows_an_answer_is_not_taken_without_end(serve, rest):
    with serve(hello)() as connection:
        connection.sendall(POST)
        assert connection.recv(65536).endswith(b"hello")
        if rest.startswith(b"x"):
            # Trailers.
            connection.sendall(b"0\r\n")
        with pytest.raises(ConnectionError):  # noqa: PT012 - reset at one of them
            for _ in range(30_000):
                connection.sendall(rest)


@pytest.mark.parametrize("first", [b"", b"\r\n", POST, POST + b"3e8\r\n", GET + b"\r\n"])
def test_a_client_that_drips_ends(serve, monkeypatch, first):
    monkeypatch.setattr("deploy.service.gateway.http_server._KEEP_ALIVE_S", 0.5)
    monkeypatch.setattr("deploy.service.gateway.http_protocol.REQUEST_TIMEOUT_S", 0.5)
    with serve(hello)() as connection:
        connection.settimeout(0.1)
        connection.sendall(first)
        until = time.monotonic() + _WAIT_S
        with pytest.raises(ConnectionError):  # noqa: PT012 - at one of them
            while time.monotonic() < until:
                connection.sendall(b"\r\n" if first.endswith(b"\r\n") and first != POST else b"")
                try:
                    if not connection.recv(65536):
                        raise ConnectionError
                except TimeoutError:
                    pass


def test_an_answer_under_way_comes_whole_whatever_follows_the_request(serve):
    async def slow(scope, receive, send):
        await asyncio.sleep(0.5)
        await hello(scope, receive, send)

    for rest in (GET, GET + GET, GET[:-2], b"\x00 no HTTP", b"a" * 200_000):
        with serve(slow)() as connection:
            connection.sendall(GET + rest)
            answer = all_of(connection)
            assert answer.startswith(b"HTTP/1.1 200"), rest[:20]
            assert answer.endswith(b"hello")
            assert answer.count(b"HTTP/1.1") == 1


def test_an_answer_that_has_begun_comes_whole_whatever_follows_the_request(serve):
    is_sent = threading.Event()

    async def slow(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hel", "more_body": True})
        await asyncio.to_thread(is_sent.wait, _WAIT_S)
        await asyncio.sleep(0.5)
        await send({"type": "http.response.body", "body": b"lo"})

    for rest in (GET, b"\x00 no HTTP"):
        is_sent.clear()
        with serve(slow)() as connection:
            connection.sendall(GET)
            begun = connection.recv(65536)
            connection.sendall(rest)
            is_sent.set()
            assert (begun + all_of(connection)).endswith(b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"), rest


def test_an_application_that_fails_ends_its_connection(serve):
    async def fails(scope, receive, send):
        raise ValueError

    with serve(fails)() as connection:
        connection.sendall(GET)
        assert all_of(connection).startswith(b"HTTP/1.1 500")


def test_a_connection_whose_body_came_after_its_answer_is_kept_until_its_time(serve):
    with serve(hello)() as connection:
        connection.sendall(POST)
        assert connection.recv(65536).endswith(b"hello")
        connection.sendall(b"0\r\n\r\n" + GET)
        assert connection.recv(65536).endswith(b"hello")
        connection.sendall(POST)
        assert connection.recv(65536).endswith(b"hello")
        (protocol,) = serve.servers[-1]._server.server_state.connections
        protocol._idle_timeout_s = 0.5
        connection.sendall(b"0\r\n\r\n")
        assert all_of(connection) == b""


def test_a_body_that_is_no_body_is_refused(app, serve):
    gated = AccessControl(app, ApiKeys.of(TOKEN, "test"), RateLimits("1000/second"))
    head = f"POST /tokenize HTTP/1.1\r\nhost: d1\r\nauthorization: Bearer {TOKEN}\r\n"
    with serve(gated)() as connection:
        connection.sendall((head + "transfer-encoding: chunked\r\n\r\n").encode())
        time.sleep(0.2)
        connection.sendall(b"no size\r\n")
        assert refusal(all_of(connection)) == (400, "Invalid HTTP request received.")


def test_a_client_that_reads_nothing_ends(serve, monkeypatch):
    monkeypatch.setattr("deploy.service.gateway.http_protocol.UNREAD_TIMEOUT_S", 0.5)
    ended = threading.Event()

    async def much(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(20):
            await send({"type": "http.response.body", "body": b"a" * 1_000_000, "more_body": True})
        ended.set()

    with serve(much)() as connection:
        connection.sendall(GET)
        assert ended.wait(_WAIT_S)


def test_what_is_no_http_is_refused_as_everything_is(serve):
    with serve(hello)() as connection:
        connection.sendall(b"\x16\x03\x01 this is TLS\r\n\r\n")
        assert refusal(all_of(connection)) == (400, "Invalid HTTP request received.")


def test_a_connection_that_says_nothing_ends(serve, monkeypatch):
    monkeypatch.setattr("deploy.service.gateway.http_server._KEEP_ALIVE_S", 0.3)
    with serve(hello)() as connection:
        assert all_of(connection) == b""


def test_a_body_that_does_not_end_is_refused(app, serve, monkeypatch):
    monkeypatch.setattr("deploy.service.gateway.access.BODY_TIMEOUT_S", 0.3)
    gated = AccessControl(app, ApiKeys.of(TOKEN, "test"), RateLimits("1000/second"))
    head = f"POST /tokenize HTTP/1.1\r\nhost: d1\r\nauthorization: Bearer {TOKEN}\r\n"
    with serve(gated)() as connection:
        connection.sendall((head + "content-type: application/json\r\ncontent-length: 99\r\n\r\n{").encode())
        assert refusal(all_of(connection)) == (408, "The body was not there after 0 s.")


def test_an_answer_that_has_begun_is_whole_when_the_server_ends(free_port):
    async def slow(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
        for _ in range(2):
            await send({"type": "http.response.body", "body": b"hello", "more_body": True})
            await asyncio.sleep(0.5)
        await send({"type": "http.response.body", "body": b""})

    server = HttpServer(slow, Address(host="127.0.0.1", port=free_port), end_within_s=10)
    with closing(socket.create_connection(("127.0.0.1", free_port), timeout=_WAIT_S)) as connection:
        connection.sendall(GET)
        begun = connection.recv(65536)
        assert begun.startswith(b"HTTP/1.1 200")
        server.end(20)
        assert (begun + all_of(connection)).endswith(b"\r\n\r\nhellohello")


def is_healthy(server):
    try:
        server.check()
    except RuntimeError:
        return False
    return True


def test_a_server_whose_loop_hangs_is_not_healthy(free_port, monkeypatch):
    hangs_until = threading.Event()

    async def hangs(scope, receive, send):
        hangs_until.wait(_WAIT_S)
        await hello(scope, receive, send)

    server = HttpServer(hangs, Address(host="127.0.0.1", port=free_port), end_within_s=1)
    server.check()
    monkeypatch.setattr("deploy.service.gateway.http_server._HUNG_AFTER_S", 0.5)
    with closing(socket.create_connection(("127.0.0.1", free_port), timeout=_WAIT_S)) as connection:
        connection.sendall(GET)
        with pytest.raises(RuntimeError, match=r"has not turned for \d+ s"):
            wait_until(server.check, "the check to see it")
        hangs_until.set()
        assert connection.recv(65536).endswith(b"hello")
    wait_until(lambda: is_healthy(server), "its loop to turn again")
    server.end(20)
    with pytest.raises(RuntimeError, match="has died"):
        server.check()


def test_an_http_server_leaves_the_logs_of_its_process_as_they_are(app, free_port):
    target = logging.StreamHandler(io.StringIO())
    # As Ray Serve logs: its controller asks where, and takes a replica that cannot say for dead.
    handler = logging.handlers.MemoryHandler(1, target=target)
    HttpServer(app, Address(host="127.0.0.1", port=free_port), end_within_s=1).end(20)
    assert handler.target is target


@pytest.mark.parametrize("kept", [False, True])
def test_a_request_that_is_on_its_way_when_the_server_ends_is_answered(free_port, kept, monkeypatch):
    monkeypatch.setattr("deploy.service.gateway.http_protocol._LAST_REQUEST_S", 20.0)
    server = HttpServer(hello, Address(host="127.0.0.1", port=free_port), end_within_s=20)
    with closing(socket.create_connection(("127.0.0.1", free_port), timeout=_WAIT_S)) as connection:
        if kept:
            connection.sendall(GET)
            assert connection.recv(65536).endswith(b"hello")
        wait_until(lambda: server._server.server_state.connections, "the connection")
        ending = threading.Thread(target=server.end, args=[20])
        ending.start()
        wait_until(lambda: not server._server.servers[0].is_serving(), "the end")
        connection.sendall(GET)
        answer = all_of(connection)
        assert answer.endswith(b"hello")
        assert b"connection: close" in answer
        ending.join()


def test_connections_that_say_nothing_do_not_hold_up_the_end(free_port):
    server = HttpServer(hello, Address(host="127.0.0.1", port=free_port), end_within_s=10)
    with closing(socket.create_connection(("127.0.0.1", free_port), timeout=_WAIT_S)):
        wait_until(lambda: server._server.server_state.connections, "the connection")
        began = time.monotonic()
        server.end(20)
        assert time.monotonic() - began < 8


def test_a_connection_that_waits_to_be_taken_when_the_server_ends_is_answered(free_port):
    server = HttpServer(hello, Address(host="127.0.0.1", port=free_port), end_within_s=10)
    wait_until(lambda: server._server.started, "the server")
    listening = server._server.servers[0]

    async def come_and_end():
        # The loop does not turn between the two: it has not seen who came.
        connection = socket.create_connection(("127.0.0.1", free_port), timeout=_WAIT_S)
        connection.sendall(GET)
        await shutdown([server._listening])
        server._server.should_exit = True
        return connection

    async def has_ended(sockets=None):
        """It ends once."""

    shutdown, server._server.shutdown = server._server.shutdown, has_ended

    with closing(asyncio.run_coroutine_threadsafe(come_and_end(), listening.get_loop()).result(20)) as connection:
        assert all_of(connection).endswith(b"hello")
