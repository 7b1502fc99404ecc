"""Timeouts and size limits of HTTP connections: who never finishes what it begins does not keep one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from deploy.service.errors import ServiceError

HEAD_TIMEOUT_S = 20.0
"""A request's line and headers have so long from their first byte, in seconds."""
MAX_HEAD_BYTES = 64 * 1024
# The gate has narrower bounds for bodies that somebody reads: these are for those that were answered without.
REQUEST_TIMEOUT_S = 90.0
MAX_REQUEST_BYTES = 4 * 1024 * 1024
# A client that reads nothing has so long.
UNREAD_TIMEOUT_S = 60.0
_LINGER_S = 1.0
# A request may be under way when the server ends, over a connection that is new or was kept.
_LAST_REQUEST_S = 1.0
# Where a request's state has its connection.
_CONNECTION = "d1.connection"


class _PipelinedError(Exception):
    """A request began while another is answered."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection.

    uvicorn by itself waits as long as it takes for a first request, for the end of headers and of bodies that nobody
    reads, and for clients to read. It also answers requests that come while another is answered (pipelining), which
    no client of ours does; here such a connection ends after the answer, and the client asks again.

    It rests on what asyncio, httptools and ASGI (`announced`) tell, not on what uvicorn keeps for itself.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """As uvicorn makes one for each connection."""
        super().__init__(config, server_state, {**app_state, _CONNECTION: self}, _loop)
        self._idle_timeout_s = config.timeout_keep_alive
        self._socket: asyncio.Transport
        # Whether a request's headers are not all there.
        self._is_head = False
        # Whether a request is not all there.
        self._is_request = False
        # Whether a request began with the bytes just received.
        self._has_begun = False
        # Whether a request that is there is not answered, and whether its answer has begun.
        self._is_asked = False
        self._is_answering = False
        # Whether what comes is dropped: the connection ends after the answer.
        self._is_deaf = False
        # Whether nothing more is said.
        self._is_ending = False
        # Whether the server ends: a request that is on its way is answered, and none after it.
        self._is_last = False
        # Of the request that is not all there, or of what was dropped.
        self._num_bytes = 0
        # While no request is there, while one is not all there, and while the client reads nothing.
        self._idle_timer = _Timer()
        self._request_timer = _Timer()
        self._unread_timer = _Timer()

    # What asyncio tells.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client that says nothing has as long as one that keeps its connection."""
        super().connection_made(transport)
        self._socket = transport
        self._idle_timer.start(self._idle_timeout_s, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more comes."""
        for timer in (self._idle_timer, self._request_timer, self._unread_timer):
            timer.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of a request that does not end, whoever keeps them."""
        was_request, self._has_begun = self._is_request, False
        if not self._is_deaf:
            super().data_received(data)
        if self._is_deaf or (was_request and self._is_request and not self._has_begun):
            self._count(len(data))

    def pause_writing(self) -> None:
        """The client is behind."""
        super().pause_writing()
        self._unread_timer.start(UNREAD_TIMEOUT_S, self._socket.abort)

    def resume_writing(self) -> None:
        """The client has read."""
        self._unread_timer.stop()
        super().resume_writing()

    # What the parser tells.

    def on_message_begin(self) -> None:
        """The first byte of a request is there."""
        if self._is_asked:
            self._is_deaf = True
            # The parser stops, also in what it has already been given.
            raise _PipelinedError
        super().on_message_begin()
        self._is_head = self._is_request = self._has_begun = True
        self._num_bytes = 0
        self._idle_timer.stop()
        self._request_timer.start(HEAD_TIMEOUT_S, self._refuse_late, HEAD_TIMEOUT_S, "headers")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers are nobody's, and could go on for ever."""
        if self._is_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The application takes over."""
        self._request_timer.start(REQUEST_TIMEOUT_S, self._refuse_late, REQUEST_TIMEOUT_S, "request")
        super().on_headers_complete()
        self._is_head, self._is_asked = False, True

    def on_message_complete(self) -> None:
        """All of a request is there."""
        self._is_request = False
        self._request_timer.stop()
        super().on_message_complete()
        self._wait_if_idle()

    # What the application tells.

    def begin_answer(self, message: Message) -> Message:
        """An answer begins: its `http.response.start` event, which says so where it is the last of the connection."""
        self._is_answering = True
        if not (self._is_last or self._is_deaf):
            return message
        return {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}

    def end_answer(self) -> None:
        """All of an answer is written. One that fails has no end: uvicorn closes its connection."""
        self._is_asked = self._is_answering = False
        if self._is_last or self._is_deaf:
            self._close()
        else:
            self._wait_if_idle()

    # How it ends.

    def shutdown(self) -> None:
        """The server takes no more connections."""
        self._is_last = True
        self._wait_if_idle()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused in the form of everything else."""
        # A parser that was stopped found nothing wrong.
        if not self._is_deaf:
            self._refuse(400, msg)

    def _wait_if_idle(self) -> None:
        """For the next request, where none is there nor under way."""
        if not (self._is_request or self._is_asked or self._socket.is_closing()):
            self._idle_timer.start(_LAST_REQUEST_S if self._is_last else self._idle_timeout_s, self._close)

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._is_head and self._num_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"The headers exceed {MAX_HEAD_BYTES} bytes.")
        elif self._num_bytes > MAX_REQUEST_BYTES:
            self._refuse(413, f"The request exceeds {MAX_REQUEST_BYTES} bytes.")

    def _refuse_late(self, timeout_s: float, what: str) -> None:
        self._refuse(408, f"The {what} took more than {timeout_s:.0f} s.")

    def _refuse(self, status: int, message: str) -> None:
        """Say why, unless something else is being said, and end."""
        if self._is_ending or self._socket.is_closing():
            return
        if self._is_asked:
            is_unanswered = not self._is_answering
            # The application hears that nobody waits any more, and writes nothing behind this.
            super().connection_lost(ConnectionAbortedError(message))
        else:
            # With its headers there it was answered, without being read.
            is_unanswered = self._is_head or not self._is_request
        if is_unanswered:
            body = ServiceError(status, message).body.model_dump_json().encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self._socket.write(head.encode() + body)
            self._close()
        else:
            self._is_deaf = True
            self._socket.close()

    def _close(self) -> None:
        """End it once the client has read what was written, or has had its time."""
        if self._is_ending or self._socket.is_closing():
            return
        self._is_ending = self._is_deaf = True
        # To close with bytes unread is a reset, which takes back what the client has not read yet.
        self._socket.write_eof()
        self._idle_timer.start(_LINGER_S, self._socket.close)
        self._unread_timer.start(UNREAD_TIMEOUT_S, self._socket.abort)


def announced(app: ASGIApp) -> ASGIApp:
    """An application whose connections (`BoundedHttpProtocol`) hear when an answer begins and ends."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        connection: BoundedHttpProtocol = scope["state"].pop(_CONNECTION)

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = connection.begin_answer(message)
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                connection.end_answer()

        await app(scope, receive, tell)

    return answer


class _Timer:
    """Calls something once, unless it is stopped or started anew before."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float, call: Callable[..., None], *values: object) -> None:
        self.stop()
        self._handle = asyncio.get_running_loop().call_later(seconds, call, *values)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
