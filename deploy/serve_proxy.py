"""What Ray Serve's HTTP proxy says by itself, before the service is up or when its process is gone, as error objects.

Every proxy loads this by the name in `PROXY_ENV`. It does not import torch, which would cost each of them seconds.
"""

from __future__ import annotations

import json

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.openai_error import error_object

PROXY_ENV = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deploy.serve_proxy.middlewares"}
"""What a proxy needs in its environment; Ray's runtime environment or `ray start` give it."""
# Serve's own paths. Probes of a cluster ask for the first; the other tells strangers what is deployed.
_PROBE, _ROUTES = "/-/healthz", "/-/routes"
_RETRY_AFTER_S = 1
# The service has the route `/`: Serve knows no route only while the service is not up.
_NOT_UP = (503, "The service is not up; try again.", "unavailable")
_OURS = {
    408: (503, "The request took too long; try again.", "timeout"),
    429: (429, "The service has too many requests; try again.", "overloaded"),
}
"""What is said in the place of Serve's texts, by their status; of all others, that the service is not up."""


def middlewares() -> list[Middleware]:
    """What Serve puts around its proxy."""
    return [Middleware(ProxyErrors)]


class ProxyErrors:
    """Turns Serve's texts into error objects. What the service itself says passes as it comes, a stream too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and answer where Serve does not or not in our words."""
        if scope["type"] != "http" or scope["path"] == _PROBE:
            await self._app(scope, receive, send)
        elif scope["path"] == _ROUTES:
            await _answer(send, scope, 404, "There is no such path.")
        else:
            answer = _Answer(send, scope)
            try:
                await self._app(scope, receive, answer)
            finally:
                # Serve answers nothing where the process that it asked has died, and its server a text then.
                await answer.end()


class _Answer:
    """Serve's answer on its way to the client."""

    def __init__(self, send: Send, scope: Scope) -> None:
        self._send, self._scope, self._is_started, self._is_replaced = send, scope, False, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_started = True
            message["headers"] = _one_request_id(message.get("headers", []))
            if _is_serves(message):
                self._is_replaced = True
                await _answer(self._send, self._scope, *_OURS.get(message["status"], _NOT_UP))
        if not self._is_replaced:
            await self._send(message)

    async def end(self) -> None:
        """Answer where Serve did not."""
        if not self._is_started:
            await _answer(self._send, self._scope, 503, "The process that answered is gone; try again.", "unavailable")


def _is_serves(start: Message) -> bool:
    """Whether it is an error in plain text: the service has its errors in JSON."""
    kinds = [bytes(value) for name, value in start["headers"] if bytes(name).lower() == b"content-type"]
    return start["status"] >= 400 and any(kind.startswith(b"text/plain") for kind in kinds)


def _one_request_id(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers with the service's `x-request-id` alone: Serve adds its own, and a client reads two as one."""
    names = [bytes(name).lower() for name, _ in headers]
    first = names.index(b"x-request-id") if b"x-request-id" in names else -1
    return [pair for place, pair in enumerate(headers) if names[place] != b"x-request-id" or place == first]


async def _answer(send: Send, scope: Scope, status: int, message: str, code: str | None = None) -> None:
    body = json.dumps(error_object(status, message, code)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"retry-after", str(_RETRY_AFTER_S).encode())] if status in (429, 503) else []
    # Serve has given one to a request that had none.
    headers += [(name, value) for name, value in scope["headers"] if name.lower() == b"x-request-id"][:1]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
