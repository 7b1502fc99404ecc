"""What stands before the application: keys, rates, sizes, and a name for each request. It runs before any parsing."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable

from limits import RateLimitItem, parse
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.service.errors import ServiceError
from deploy.service.keys import Keys

MAX_BODY_BYTES = 1024 * 1024
OPEN_PATHS = frozenset({"/health", "/health/ready", "/-/healthz", "/"})
OPEN_PREFIX = "/assets/"
_OPEN_METHODS = frozenset({"GET", "HEAD"})
_REQUEST_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Rates:
    """How often each key may ask."""

    def __init__(self, limit: str) -> None:
        """`limit` as the `limits` package writes it: "600/minute". Raises ValueError when it is none."""
        self._limit: RateLimitItem = parse(limit)
        # The synchronous storage starts a thread for each request.
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())

    async def refusal(self, owner: str) -> ServiceError | None:
        """Count a request; why it is too much, or None."""
        if await self._limiter.hit(self._limit, owner):
            return None
        window = await self._limiter.get_window_stats(self._limit, owner)
        reset_s = window.reset_time - time.time()
        retry_after_s = max(1, min(60, round(reset_s)))
        return ServiceError(429, f"This key may ask {self._limit}.", "rate_limit_exceeded", retry_after_s=retry_after_s)


def is_open(method: str, path: str) -> bool:
    """Whether it takes no key: health, and the page, which has no secret."""
    return method in _OPEN_METHODS and (path in OPEN_PATHS or path.startswith(OPEN_PREFIX))


def nothing_open(_method: str, _path: str) -> bool:
    """Of a listener that has nothing for whoever has no key."""
    return False


class Gate:
    """Lets nothing through without a key, except to the open paths, and no large body."""

    def __init__(self, app: ASGIApp, keys: Keys, rates: Rates, opens: Callable[[str, str], bool] = is_open) -> None:
        """Guard `app`; `opens` says which methods and paths take no key."""
        self._app, self._keys, self._rates, self._opens = app, keys, rates, opens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or refuse."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            named = _named(send, _request_id(scope))
            error = await self._refusal(scope)
            if error is not None:
                await error.response()(scope, receive, named)
            else:
                await self._app(scope, _limited(receive), named)

    async def _refusal(self, scope: Scope) -> ServiceError | None:
        if self._opens(scope["method"], scope["path"]):
            return None
        owner = self._keys.owner([value for name, value in scope["headers"] if name == b"authorization"])
        if owner is None:
            return ServiceError(401, "Send a key: `Authorization: Bearer KEY`.", "invalid_api_key")
        return await self._rates.refusal(owner)


def _request_id(scope: Scope) -> bytes:
    sent = [value for name, value in scope["headers"] if name == b"x-request-id"]
    return sent[0] if len(sent) == 1 and _REQUEST_ID.fullmatch(sent[0]) else uuid.uuid4().hex.encode()


def _named(send: Send, request_id: bytes) -> Send:
    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
        await send(message)

    return named


def _limited(receive: Receive) -> Receive:
    """Stops a body that is too large while it comes, whatever length it announces."""
    num_bytes = 0

    async def limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            # FastAPI reads the body, and takes any other exception for bad JSON.
            raise HTTPException(413, f"The body exceeds {MAX_BODY_BYTES} bytes.")
        return message

    return limited
