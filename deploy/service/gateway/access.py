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
"""Time limit for a body to arrive, in seconds."""
OPEN_PATHS = frozenset({"/health", "/health/ready", "/ping", "/"})
OPEN_PREFIX = "/assets/"
_OPEN_METHODS = frozenset({"GET", "HEAD"})
_REQUEST_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MAX_LOGGED = 128


def is_open(method: str, path: str) -> bool:
    """Whether a request needs no key: health checks, and the page's files, which contain no secret."""
    return method in _OPEN_METHODS and (path in OPEN_PATHS or path.startswith(OPEN_PREFIX))


class AccessControl:
    """Rejects requests without a key, except to the open paths, and large bodies."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, rates: RateLimits, callers: Callers = ANYBODY) -> None:
        """Guard `app`."""
        self._app, self._keys, self._rates, self._callers = app, keys, rates, callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or refuse it."""
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                await self._rates.aclose()
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            with bound_contextvars(request_id=_request_id(scope)):
                await self._answer(scope, receive, _Answer(send))

    async def _answer(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        began_s, method, path = time.monotonic(), scope["method"], scope["path"]
        try:
            error = await self._refusal(scope)
            if error is not None:
                await error.response()(scope, receive, answer)
            else:
                await self._app(scope, _limited(receive, answer), answer)
        finally:
            # Health is polled every second.
            if not is_open(method, path):
                what = {"method": method, "path": printable(path)[:_MAX_LOGGED], "status": answer.status}
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
    """Return the `x-request-id`, which Serve's proxy adds where the client sends none; a new id if it is malformed."""
    sent = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(sent) == 1 and _REQUEST_ID.fullmatch(sent[0]):
        return sent[0].decode()
    return uuid.uuid4().hex


class _Answer:
    """Sends an answer and records its status. Serve's proxy adds its `x-request-id`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False
        self.status: int | None = None
        """None if the client disconnected before the answer."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun, self.status = True, message["status"]
        await self._send(message)


def _limited(receive: Receive, answer: _Answer) -> Receive:
    """Reject a body that is too large or too slow while it arrives, whatever length it announces."""
    num_bytes, is_whole, ends_s = 0, False, time.monotonic() + BODY_TIMEOUT_S

    async def limited() -> Message:
        nonlocal num_bytes, is_whole
        if is_whole:
            # Only the client's disconnect can follow.
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
