"""HTTP client for reward endpoints, with limits, retries and bounded concurrency."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt

from rewards.terms.post import HttpResponse, ResponseTooLargeError, post
from rewards.terms.term import RewardUnavailableError, TermConfig

LONGEST_WAIT_S = 8.0
"""Longest wait between two tries, in seconds. If a server's Retry-After is longer, the run pauses instead of waiting
here: graders have a time limit."""

_FIRST_WAIT_S = 0.5
# Transient failures: another try may succeed.
_TRANSIENT_STATUSES = (
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
# Failures caused by this request. Any other refusal (401, 404, a redirect) would be the same for every request.
_ABOUT_THE_REQUEST = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)

Q = TypeVar("Q")
R = TypeVar("R")


class RequestRejectedError(Exception):
    """The endpoint works, but has no usable answer to this request; the message says why."""


class _TransientError(Exception):
    """A try failed in a possibly transient way; the message says how."""

    def __init__(self, what: str, retry_after_s: float | None = None) -> None:
        super().__init__(what)
        self.retry_after_s = retry_after_s


class RemoteTermConfig(TermConfig):
    """Settings common to the terms that query a server."""

    timeout_s: PositiveFloat = 12.0
    """Timeout of one try of a request, in seconds."""
    num_tries: Annotated[int, Field(ge=1, le=10)] = 3
    """Tries of a request, with waits of up to 8 s in between. If all fail, the run pauses."""
    max_concurrency: Annotated[int, Field(ge=1, le=256)] = 8
    """Maximum number of concurrent requests of a grader."""
    max_response_bytes: PositiveInt = 1_000_000
    """Maximum size of a response, in bytes."""

    @property
    def total_timeout_s(self) -> float:
        """Total timeout of a request to a server that does not answer, over all tries and waits, in seconds."""
        return self.num_tries * self.timeout_s + (self.num_tries - 1) * LONGEST_WAIT_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """An HTTP endpoint with its timeouts and retries."""

    url: str
    """As returned by `checked_url`. Redirects are not followed and no proxy is used."""
    token: str | None = field(repr=False)
    """Sent as `Authorization: Bearer`."""
    timeout_s: float
    """Timeout of one try, in seconds."""
    num_tries: int
    """Tries of one request."""
    max_bytes: int
    """Maximum size of a response, in bytes."""
    before_try: Callable[[], None]
    """Called before every try, to limit the rate and to count."""

    def post_json(self, value: Mapping[str, Any]) -> bytes:
        """Post a JSON object and return the body of the response.

        Raises:
            RequestRejectedError: this request has no usable answer (status 400, 413 or 422, or a response that is too
                large).
            RewardUnavailableError: no try succeeded, or the endpoint would refuse any request.
        """
        body = json.dumps(value).encode()
        for attempt in range(1, self.num_tries + 1):
            try:
                return self._try(body)
            except _TransientError as error:
                wait_s = error.retry_after_s
                if wait_s is None:
                    wait_s = min(LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** (attempt - 1))
                if attempt == self.num_tries or wait_s > LONGEST_WAIT_S:
                    tries = f"{attempt} {'try' if attempt == 1 else 'tries'}"
                    raise RewardUnavailableError(f"{self.url} does not answer: {error}, after {tries}") from error
            time.sleep(wait_s)
        raise AssertionError("there is at least one try")

    def _try(self, body: bytes) -> bytes:
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        self.before_try()
        try:
            response = post(self.url, body, headers, timeout_s=self.timeout_s, max_bytes=self.max_bytes)
        except ResponseTooLargeError as error:
            raise RequestRejectedError(f"{self.url} answered with more than {self.max_bytes} bytes") from error
        except (OSError, http.client.HTTPException) as error:
            raise _TransientError(str(error) or type(error).__name__) from error
        if response.status in _TRANSIENT_STATUSES:
            raise _TransientError(f"status {response.status}", _retry_after_s(response))
        if response.status in _ABOUT_THE_REQUEST:
            raise RequestRejectedError(f"{self.url} answered {response.status}")
        if response.status != HTTPStatus.OK:
            raise RewardUnavailableError(f"{self.url} refuses to answer: status {response.status}{_redirect(response)}")
        return response.body


def map_concurrently(function: Callable[[Q], R], items: Iterable[Q], max_concurrency: int) -> list[R]:
    """Return `function`'s result for each item, in order, with at most `max_concurrency` at a time.

    Raises the first RewardUnavailableError and skips the items that have not started. Otherwise an endpoint that
    never answers would cost the full timeout for each item, and graders have a time limit.
    """
    # The message and not the error, which keeps its frames alive, and with them the connection.
    found: list[str] = []

    def unless_unavailable(item: Q) -> R:
        # A thread whose item failed takes the next one before the pool can be cancelled.
        if found:
            raise RewardUnavailableError(found[0])
        try:
            return function(item)
        except RewardUnavailableError as error:
            found.append(str(error))
            raise

    with ThreadPoolExecutor(max_concurrency) as pool:
        return list(pool.map(unless_unavailable, items))


def checked_url(url: str) -> str:
    """Return the URL if it may be used. Raises ValueError otherwise."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} is no URL: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"{url!r} should begin with http:// or https:// and name a host")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"the URL of {host} has a user or a password in it; name an environment variable for a secret")
    if parts.fragment or not url.isascii() or any(character <= " " for character in url):
        raise ValueError(f"{url!r} should have ASCII letters without spaces, and nothing after a #")
    return url


def _retry_after_s(response: HttpResponse) -> float | None:
    """Return the seconds of the Retry-After header; None if there are none (dates are not parsed)."""
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return None


def _redirect(response: HttpResponse) -> str:
    place = response.headers.get("location")
    return "" if place is None else f", a redirect to {place[:200]!r}, which is not followed"
