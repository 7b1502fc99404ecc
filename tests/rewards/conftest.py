"""Shared fixtures of the reward tests: samples, and a real HTTP server with scripted replies."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rewards import Problem, Sample
from rewards.data.prompts import user_turn


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Scripted reply to one request."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    drip_s: float = 0.0
    """Seconds between two bytes of the body."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that the server received."""

    path: str
    headers: dict[str, str]
    body: Any


class Server:
    """HTTP server that sends `replies` in order, then `answer`."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.answer: Callable[[Any], Reply] = lambda body: Reply(status=404)
        self.asked: list[Asked] = []
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                reply = server._reply(self, body)
                time.sleep(reply.delay_s)
                # Record before the client receives the reply and can send another request.
                with server._lock:
                    server._at_once -= 1
                # The client may have disconnected.
                with suppress(OSError):
                    server._send(self, reply)

            def log_message(self, *_: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                pass

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _reply(self, handler: BaseHTTPRequestHandler, body: Any) -> Reply:
        with self._lock:
            headers = {name.lower(): value for name, value in handler.headers.items()}
            self.asked.append(Asked(path=handler.path, headers=headers, body=body))
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            return self.replies.pop(0) if self.replies else self.answer(body)

    def _send(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        handler.send_response(reply.status)
        for name, value in ({"Content-Length": str(len(reply.body))} | reply.headers).items():
            handler.send_header(name, value)
        handler.end_headers()
        if reply.drip_s:
            for byte in reply.body:
                handler.wfile.write(bytes([byte]))
                time.sleep(reply.drip_s)
        else:
            handler.wfile.write(reply.body)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits between retries."""
    monkeypatch.setattr("rewards.terms.endpoint._FIRST_WAIT_S", 0.01)


def make_sample(text: str = "309", answer: str = "309", **changes: Any) -> Sample:
    """Make a completion of a running-sum problem."""
    problem = Problem(
        problem_id="sums/3,7,9",
        messages=user_turn("3 7 9"),
        answer=answer,
        reference_completion="",
        metadata={"k": "v"},
    )
    facts = {"num_tokens": 6, "num_forwards": 3, "max_tokens": 8, "is_truncated": False} | changes
    return Sample(problem=problem, text=text, **facts)


@pytest.fixture
def sample() -> Callable[..., Sample]:
    """Factory of samples."""
    return make_sample
