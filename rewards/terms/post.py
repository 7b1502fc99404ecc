"""One POST of JSON with limits on time and size. Follows no redirect and uses no proxy."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

_CHUNK_BYTES = 65536


class TooLargeError(Exception):
    """An answer has more bytes than it may have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a server answered, whatever its status."""

    status: int
    """HTTP status."""
    headers: Mapping[str, str]
    """By name in lower case."""
    body: bytes
    """Empty for a status that is not 200: nobody reads it."""


def post(url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float, max_bytes: int) -> Answer:
    """Send `body` to `url` and read the answer, all within about `timeout_s` seconds.

    Raises OSError (its TimeoutError among them) or http.client.HTTPException where the server cannot be reached or
    breaks off, and TooLargeError for an answer of more than `max_bytes`.
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
                raise TooLargeError
        if response.status == http.client.OK and response.length:
            # Unlike `read`, `read1` says nothing of an end that comes too early.
            raise http.client.IncompleteRead(bytes(read), response.length)
        named = {name.lower(): value for name, value in response.getheaders()}
        return Answer(status=response.status, headers=named, body=bytes(read))
    finally:
        connection.close()


def _left(deadline: float) -> float:
    """Seconds until a deadline. Raises TimeoutError after it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the answer took too long")
    return left
