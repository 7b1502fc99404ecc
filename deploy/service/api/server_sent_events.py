"""Server-sent events as an answer."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

PING_S = 15.0
"""A listener that nothing happens to hears a comment this often, in seconds: proxies end what is silent."""


class ServerSentEvents(StreamingResponse):
    """Server-sent events. When the client goes, what makes them is closed at once, not when it is collected."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_end: Callable[[], Awaitable[None]] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Send `events`; `on_end` is called when no more is sent, be it that nothing ever was."""
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"} | (headers or {})
        super().__init__(events, headers=headers)
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            if self._on_end is not None:
                await self._on_end()


def frame(event_id: str, kind: str, data: dict[str, Any]) -> bytes:
    """One event."""
    return f"id: {event_id}\nevent: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def comment(text: str) -> bytes:
    """What a client ignores."""
    return f": {text}\n\n".encode()
