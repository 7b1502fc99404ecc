"""Timeouts and size limits of HTTP connections: who never finishes what it begins does not keep one."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

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


class _PipelinedError(Exception):
    """A request began while another is answered."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection.

    uvicorn by itself waits as long as it takes for a first request, for the end of headers and of bodies that nobody
    reads, and for clients to read. It also answers requests that come while another is answered (pipelining), which
    no client of ours does; here such a connection ends after the answer, and the client asks again.
    """

    _is_head = False
    """Whether a request's headers are not all there."""
    _is_request = False
    """Whether a request is not all there."""
    _has_begun = False
    """Whether a request began with the bytes just received."""
    _is_deaf = False
    """Whether what comes is dropped: the connection ends after the answer."""
    _is_ending = False
    """Whether nothing more is said."""
    _is_last = False
    """Whether the server ends: a request that is on its way is answered, and none after it."""
    _num_bytes = 0
    """Of the request that is not all there, or of what was dropped."""
    _timer: asyncio.TimerHandle | None = None
    """Runs while a request is not all there."""
    _unread_timer: asyncio.TimerHandle | None = None
    """Runs while the client reads nothing."""

    # What asyncio tells.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client that says nothing has as long as one that keeps its connection."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more comes."""
        self._stop_timer()
        self._stop_unread_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of a request that does not end, whoever keeps them."""
        was_request, self._has_begun = self._is_request, False
        # uvicorn would end this timer at any byte, one of a request or not.
        idle, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        if not self._is_deaf:
            super().data_received(data)
        if idle is not None:
            if self._has_begun:
                idle.cancel()
            else:
                self.timeout_keep_alive_task = idle
        if self._is_deaf or (was_request and self._is_request and not self._has_begun):
            self._count(len(data))

    def pause_writing(self) -> None:
        """The client is behind."""
        super().pause_writing()
        self._stop_unread_timer()
        self._unread_timer = self.loop.call_later(UNREAD_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read."""
        self._stop_unread_timer()
        super().resume_writing()

    # What the parser tells.

    def on_message_begin(self) -> None:
        """The first byte of a request is there."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._is_deaf = True
            self.cycle.keep_alive = False
            # The parser stops, also in what it has already been given.
            raise _PipelinedError
        super().on_message_begin()
        self._is_head = self._is_request = self._has_begun = True
        self._num_bytes = 0
        self._start_timer(HEAD_TIMEOUT_S, "headers")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers are nobody's, and could go on for ever."""
        if self._is_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The application takes over."""
        self._start_timer(REQUEST_TIMEOUT_S, "request")
        super().on_headers_complete()
        self._is_head = False
        if self._is_last:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """All of a request is there."""
        self._is_request = False
        self._stop_timer()
        super().on_message_complete()

    # How it ends.

    def shutdown(self) -> None:
        """The server takes no more connections."""
        self._is_last = True
        if self._is_idle:
            self.loop.call_later(_LAST_REQUEST_S, self._end_if_idle)
        elif self.cycle is not None:
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused in the form of everything else."""
        # A parser that was stopped found nothing wrong.
        if not self._is_deaf:
            self._refuse(400, msg)

    def timeout_keep_alive_handler(self) -> None:
        """Nothing was asked for long."""
        self._close()

    @property
    def _is_idle(self) -> bool:
        """Whether no request is there, nor under way."""
        return not self._is_request and (self.cycle is None or self.cycle.response_complete)

    def _end_if_idle(self) -> None:
        if self._is_idle:
            self._close()

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._is_head and self._num_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"The headers exceed {MAX_HEAD_BYTES} bytes.")
        elif self._num_bytes > MAX_REQUEST_BYTES:
            self._refuse(413, f"The request exceeds {MAX_REQUEST_BYTES} bytes.")

    def _refuse(self, status: int, message: str) -> None:
        """Say why, unless something else is being said, and end."""
        if self._is_ending or self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            is_unanswered = not cycle.response_started
            # The application hears that nobody waits any more, and writes nothing behind this.
            cycle.disconnected = True
            cycle.message_event.set()
        else:
            # With its headers there it was answered, without being read.
            is_unanswered = self._is_head or not self._is_request
        if is_unanswered:
            body = ServiceError(status, message).body.model_dump_json().encode()
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
            self._close()
        else:
            self.transport.close()

    def _close(self) -> None:
        """End it once the client has read what was written, or has had its time."""
        if self._is_ending or self.transport.is_closing():
            return
        self._is_ending = self._is_deaf = True
        # To close with bytes unread is a reset, which takes back what the client has not read yet.
        self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)
        self.loop.call_later(UNREAD_TIMEOUT_S, self.transport.abort)

    def _start_timer(self, seconds: float, what: str) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._refuse, 408, f"The {what} took more than {seconds:.0f} s.")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
