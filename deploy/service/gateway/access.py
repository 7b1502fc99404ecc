"""Access control: Host, API keys, rate limits, body sizes and request ids, before anything is parsed."""

from __future__ import annotations

import asyncio
import re
import time
import uuid

import structlog
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from deploy.printing import printable
from deploy.service.errors import ServiceError
from deploy.service.gateway.api_keys import ApiKeys
from deploy.service.gateway.callers import ANYBODY, Callers
from deploy.service.gateway.rate_limits import RateLimits

MAX_BODY_BYTES = 1024 * 1024
BODY_TIMEOUT_S = 60.0
"""A body has so long to arrive, in seconds."""
OPEN_PATHS = frozenset({"/health", "/health/ready", "/ping", "/-/healthz", "/"})
OPEN_PREFIX = "/assets/"
_OPEN_METHODS = frozenset({"GET", "HEAD"})
_REQUEST_ID = re.compile(rb"([A-Za-z0-9][A-Za-z0-9._-]{0,127})")
_TRACE = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_LOGGED = 128


def is_open(method: str, path: str) -> bool:
    """Whether it takes no key: health, and the page, which has no secret."""
    return method in _OPEN_METHODS and (path in OPEN_PATHS or path.startswith(OPEN_PREFIX))


class AccessControl:
    """Lets nothing through without a key, except to the open paths, and no large body."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, rates: RateLimits, callers: Callers = ANYBODY) -> None:
        """Guard `app`."""
        self._app, self._keys, self._rates, self._callers = app, keys, rates, callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or refuse."""
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                await self._rates.aclose()
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            named = _Named(send, _request_id(scope))
            with bound_contextvars(request_id=named.request_id):
                await self._answer(scope, receive, named)

    async def _answer(self, scope: Scope, receive: Receive, named: _Named) -> None:
        began_s, method, path = time.monotonic(), scope["method"], scope["path"]
        try:
            error = await self._refusal(scope)
            if error is not None:
                await error.response()(scope, receive, named)
            else:
                await self._app(scope, _limited(receive, named), named)
        finally:
            # Who looks at health looks every second.
            if not is_open(method, path):
                what = {"method": method, "path": printable(path)[:_MAX_LOGGED], "status": named.status}
                structlog.get_logger().info("request", **what, seconds=round(time.monotonic() - began_s, 3))

    async def _refusal(self, scope: Scope) -> ServiceError | None:
        if (refusal := self._callers.refusal(scope)) is not None:
            return refusal
        if is_open(scope["method"], scope["path"]):
            return None
        owner = self._keys.owner([value for name, value in scope["headers"] if name == b"authorization"])
        if owner is None:
            return ServiceError(401, "Send a key: `Authorization: Bearer KEY`.", "invalid_api_key")
        return await self._rates.refusal(owner)


def _request_id(scope: Scope) -> str:
    """The client's own, the trace that it is in (W3C's `traceparent`, as OpenTelemetry sends it), or a new one."""
    for header, form in ((b"x-request-id", _REQUEST_ID), (b"traceparent", _TRACE)):
        sent = [value for name, value in scope["headers"] if name == header]
        if len(sent) == 1 and (match := form.fullmatch(sent[0])):
            return match[1].decode()
    return uuid.uuid4().hex


class _Named:
    """Sends an answer under the request's name."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self.request_id = send, request_id
        self.has_begun = False
        self.status: int | None = None
        """None where the client went before there was an answer."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun, self.status = True, message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
        await self._send(message)


def _limited(receive: Receive, answer: _Named) -> Receive:
    """Stops a body that is too large or too slow while it comes, whatever length it announces."""
    num_bytes, is_whole, ends_s = 0, False, time.monotonic() + BODY_TIMEOUT_S

    async def limited() -> Message:
        nonlocal num_bytes, is_whole
        if is_whole:
            # All that is left to hear is that the client goes.
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), ends_s - time.monotonic())
        except TimeoutError as error:
            if answer.has_begun:
                return {"type": "http.disconnect"}
            # FastAPI reads the body, and takes any other exception for bad JSON.
            slow = {"connection": "close"}
            raise HTTPException(408, f"The body was not there after {BODY_TIMEOUT_S:.0f} s.", slow) from error
        num_bytes += len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
        if num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, f"The body exceeds {MAX_BODY_BYTES} bytes.")
        return message

    return limited
