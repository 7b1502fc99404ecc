"""Access control: Host, API keys, rate limits, body sizes, request ids and metrics, before a body is parsed."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
import uuid
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from deploy.printing import printable
from deploy.service.errors import ServiceError
from deploy.service.gateway.keys import ApiKeys, RateLimits

MAX_BODY_BYTES = 1024 * 1024
BODY_TIMEOUT_S = 60.0
"""Time limit for a body to arrive, in seconds."""
MAX_CONTAINERS = 2**15
"""Maximum lists and objects of a body. These take 20 ms to parse; a body has room for half a second of them."""
OPEN_PATHS = frozenset({"/health", "/health/ready", "/ping", "/"})
OPEN_PREFIX = "/assets/"
_OPEN_METHODS = frozenset({"GET", "HEAD"})
_REQUEST_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_MAX_LOGGED = 128
_LOCAL = "localhost"
_CORS_MAX_AGE_S = 600


def is_open(method: str, path: str) -> bool:
    """Return whether a request needs no key: health checks, and the page's files, which contain no secret."""
    return method in _OPEN_METHODS and (path in OPEN_PATHS or path.startswith(OPEN_PREFIX))


def is_loopback(host: str) -> bool:
    """Return whether an address cannot be reached from other machines."""
    return host == _LOCAL or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


@dataclass(frozen=True, kw_only=True, slots=True)
class Callers:
    """Host names and origins that are accepted."""

    hosts: frozenset[str] | None = None
    """Accepted names in the Host header; None: any. IP addresses are always accepted."""
    origins: tuple[str, ...] = ()
    """Other origins whose pages may read the answers (CORS)."""

    @classmethod
    def of(cls, listens_on: str, hosts: Collection[str], origins: Collection[str]) -> Callers:
        """Return those of a service that listens on an address.

        On loopback only known names are accepted: another name could be a web page's, resolved to this machine (DNS
        rebinding). On other addresses any name is, unless the operator lists `hosts`.
        """
        known = None if not hosts and not is_loopback(listens_on) else frozenset({_LOCAL, listens_on, *hosts})
        return cls(hosts=known, origins=tuple(origins))

    def refusal(self, scope: Scope) -> ServiceError | None:
        """Return the error for a Host header that is not accepted."""
        if self.hosts is None:
            return None
        for value in (value for name, value in scope["headers"] if name == b"host"):
            name = _name(value.decode("latin-1"))
            if name not in self.hosts and not _is_address(name):
                message = "This service is not known by that Host; its operator can name it in service.allowed_hosts."
                return ServiceError(421, message, "unknown_host")
        return None

    def allowing(self, app: ASGIApp) -> ASGIApp:
        """Return the application with CORS, if there are other origins."""
        if not self.origins:
            return app
        return CORSMiddleware(
            app,
            allow_origins=self.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("authorization", "content-type", "last-event-id", "x-request-id"),
            expose_headers=("retry-after", "x-policy-version", "x-request-id"),
            max_age=_CORS_MAX_AGE_S,
        )


ANYBODY = Callers()
"""Any Host, and no other origin."""


class RequestObserver(Protocol):
    """Receiver of request metrics. A path is one of the application's, or "other"."""

    def num_open_is(self, num_open: int) -> None:
        """Set the number of requests in progress."""

    def first_byte(self, path: str, seconds: float) -> None:
        """Record the time until the first byte of an answer's body."""

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Record the end of a request; status 0 if it got no answer."""


class AccessControl:
    """ASGI application that rejects unauthorized and oversized requests, and forwards all others to `app`."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        rates: RateLimits,
        *,
        callers: Callers = ANYBODY,
        observers: Collection[RequestObserver] = (),
        paths: Collection[str] = (),
    ) -> None:
        """Guard `app`. `observers` receive the metrics of all requests, by those `paths`."""
        self._app, self._keys, self._rates, self._callers = app, keys, rates, callers
        self._observers, self._paths, self._num_open = observers, paths, 0

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
                await self._observe(scope, receive, send)

    async def _observe(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and log and count it."""
        began_s, method, path = time.monotonic(), scope["method"], scope["path"]
        counted_path = path if path in self._paths else "other"

        def first_byte() -> None:
            for observer in self._observers:
                observer.first_byte(counted_path, time.monotonic() - began_s)

        answer = _Answer(send, first_byte)
        self._count_open(1)
        try:
            error = await self._refusal(scope)
            if error is not None:
                await error.response()(scope, receive, answer)
            else:
                await self._app(scope, _limited(receive, answer), answer)
        finally:
            seconds = time.monotonic() - began_s
            self._count_open(-1)
            for observer in self._observers:
                observer.answered(counted_path, answer.status or 0, seconds)
            # Health is polled every second.
            if not is_open(method, path):
                what = {"method": method, "path": printable(path)[:_MAX_LOGGED], "status": answer.status}
                structlog.get_logger().info("request", **what, seconds=round(seconds, 3))

    def _count_open(self, change: int) -> None:
        self._num_open += change
        for observer in self._observers:
            observer.num_open_is(self._num_open)

    async def _refusal(self, scope: Scope) -> ServiceError | None:
        if (refusal := self._callers.refusal(scope)) is not None:
            return refusal
        if is_open(scope["method"], scope["path"]):
            return None
        owner = self._keys.owner([value for name, value in scope["headers"] if name == b"authorization"])
        if owner is None:
            return ServiceError(401, "Send a key: `Authorization: Bearer KEY`.", "invalid_api_key")
        return await self._rates.refusal(owner)


class BoundedRoute(APIRoute):
    """Route that counts the lists and objects of a body before it is parsed, which would delay every stream."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, after the check."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def bounded(request: Request) -> Response:
            # FastAPI handles a client that has disconnected.
            with suppress(ClientDisconnect):
                _check_containers(await request.body())
            return await handler(request)

        return bounded


def _check_containers(body: bytes) -> None:
    """Raise ServiceError if a body has too many lists and objects. Those inside strings do not count."""
    if body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS:
        return
    outside = _STRING.sub(b"", body)
    num_containers = outside.count(b"[") + outside.count(b"{")
    if num_containers > MAX_CONTAINERS:
        message = f"The body has {num_containers} lists and objects; it should have at most {MAX_CONTAINERS}."
        raise ServiceError(400, message, "invalid_value")


def _request_id(scope: Scope) -> str:
    """Return the `x-request-id`, which Serve's proxy adds where the client sends none; a new id if it is malformed."""
    sent = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(sent) == 1 and _REQUEST_ID.fullmatch(sent[0]):
        return sent[0].decode()
    return uuid.uuid4().hex


class _Answer:
    """Sends an answer, and records its status and first byte. Serve's proxy adds its `x-request-id`."""

    def __init__(self, send: Send, on_first_byte: Callable[[], None]) -> None:
        self._send, self._on_first_byte = send, on_first_byte
        self._has_body = False
        self.status: int | None = None
        """None before the answer begins, and if the client disconnected before."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif not self._has_body:
            self._has_body = True
            self._on_first_byte()
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
            if answer.status is not None:
                return {"type": "http.disconnect"}
            # FastAPI reads the body, and takes any other exception for bad JSON.
            slow = {"connection": "close"}
            raise HTTPException(408, f"The body did not arrive within {BODY_TIMEOUT_S:.0f} s.", slow) from error
        num_bytes += len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
        if num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, f"The body exceeds {MAX_BODY_BYTES} bytes.")
        return message

    return limited


def _name(host: str) -> str:
    """Return the name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
