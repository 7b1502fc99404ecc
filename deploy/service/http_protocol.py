"""uvicorn's HTTP protocol, in bounds: a client that never finishes what it begins does not keep its connection."""

from __future__ import annotations

import asyncio
import json

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from deploy.service.errors import ServiceError

HEAD_TIMEOUT_S = 20.0
"""A request's line and headers have so long from their first byte, in seconds."""
MAX_HEAD_BYTES = 64 * 1024


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. uvicorn alone waits for a first request, and for the end of its headers, for as long as it takes.

    A body's time and size are the gate's business: it has keys to ask for first.
    """

    _head_timer: asyncio.TimerHandle | None = None
    """Runs while a request's headers are not all there."""
    _num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client that says nothing has as long as one that keeps its connection."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more comes."""
        self._end_head()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a head that does not end are counted, whoever keeps them."""
        super().data_received(data)
        if self._head_timer is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"The headers exceed {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """The first byte of a request is there."""
        super().on_message_begin()
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(
            HEAD_TIMEOUT_S, self._refuse, 408, f"The headers were not there after {HEAD_TIMEOUT_S:.0f} s."
        )

    def on_headers_complete(self) -> None:
        """The application takes over."""
        self._end_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused in the form of everything else."""
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        self._end_head()
        if self.transport.is_closing():
            return
        body = json.dumps(ServiceError(status, message).body).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        # Behind an answer that is still being sent it would be read as a part of it.
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
