"""Response of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class ServerSentEvents(StreamingResponse):
    """Stream of server-sent events. Its generator is closed as soon as the client disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_end: Callable[[], Awaitable[None]],
        headers: dict[str, str] | None = None,
    ) -> None:
        """Send `events`. `on_end` is called at the end, even if nothing was sent."""
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"} | (headers or {})
        super().__init__(events, headers=headers)
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await self._on_end()
