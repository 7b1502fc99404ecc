"""HTTP POST of JSON with limits on time and size. Follows no redirect and uses no proxy."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

_CHUNK_BYTES = 65536


class ResponseTooLargeError(Exception):
    """A response is larger than allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpResponse:
    """A server's response, whatever its status."""

    status: int
    """HTTP status."""
    headers: Mapping[str, str]
    """Headers by lower-case name."""
    body: bytes
    """Empty if the status is not 200: other bodies are not read."""


def post(url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float, max_bytes: int) -> HttpResponse:
    """Send `body` to `url` and read the response, all within about `timeout_s` seconds.

    Raises OSError (including TimeoutError) or http.client.HTTPException if the server cannot be reached or the
    connection breaks, and ResponseTooLargeError if the response has more than `max_bytes`.
    """
    parts = urlsplit(url)
    deadline = time.monotonic() + timeout_s
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = make(parts.hostname or "", parts.port, timeout=timeout_s)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.connect()
        socket = connection.sock
        socket.settimeout(_left(deadline))
        connection.request("POST", target, body, {"Content-Type": "application/json"} | dict(headers))
        response = connection.getresponse()
        read = bytearray()
        while response.status == http.client.OK:
            socket.settimeout(_left(deadline))
            if not (chunk := response.read1(_CHUNK_BYTES)):
                break
            read += chunk
            if len(read) > max_bytes:
                raise ResponseTooLargeError
        if response.status == http.client.OK and response.length:
            # Unlike `read`, `read1` does not report a body that ends too early.
            raise http.client.IncompleteRead(bytes(read), response.length)
        named = {name.lower(): value for name, value in response.getheaders()}
        return HttpResponse(status=response.status, headers=named, body=bytes(read))
    finally:
        connection.close()


def _left(deadline: float) -> float:
    """Return the seconds until a deadline. Raises TimeoutError after it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the answer took too long")
    return left
