"""Routes whose bodies are looked at before they are parsed: what takes long to parse holds up every stream."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from deploy.service.errors import ServiceError

MAX_CONTAINERS = 2**15
"""Lists and objects of a body: some 20 ms to parse. As many as a body has room for are half a second."""
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


class BoundedRoute(APIRoute):
    """One that counts the lists and objects of its body first."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As of FastAPI's."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def bounded(request: Request) -> Response:
            # Whoever has gone is FastAPI's to tell.
            with suppress(ClientDisconnect):
                check_containers(await request.body())
            return await handler(request)

        return bounded


def check_containers(body: bytes) -> None:
    """Raise ServiceError for a body with too many lists and objects, what is written in its strings left out."""
    if body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS:
        return
    outside = _STRING.sub(b"", body)
    num_containers = outside.count(b"[") + outside.count(b"{")
    if num_containers > MAX_CONTAINERS:
        message = f"The body has {num_containers} lists and objects; it should have at most {MAX_CONTAINERS}."
        raise ServiceError(400, message, "invalid_value")
