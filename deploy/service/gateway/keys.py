"""API keys: their sources, the check of a request's key, and the rate limit of each key."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
from limits import RateLimitItem, parse
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from limits.errors import StorageError
from redis.asyncio import BlockingConnectionPool

from deploy.errors import UserError, reason
from deploy.service.errors import ServiceError
from rewards.data.encoding import decode_text

TOKEN_VARIABLE = "D1_API_TOKEN"  # noqa: S105 - a name
KEYS_FILE_VARIABLE = "D1_API_KEYS_FILE"
TOKEN_FILE = "service.token"  # noqa: S105 - a name
_LEAST_LENGTH = 16
_MADE = re.compile(r"[A-Za-z0-9_-]{43}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Time limit for a count, in seconds.
_TIMEOUT_S = 0.5
_RETRY_S = 5.0
# Of an ingress, for its counts; more requests at a time wait for each other.
_MAX_CONNECTIONS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKeys:
    """Digests of the keys that open the service; they reveal no key."""

    digests: Mapping[str, bytes]
    """SHA-256 of each key, by its name."""

    @classmethod
    def of(cls, text: str, source: str) -> ApiKeys:
        """Parse keys, one a line: `name:key` or the key alone. Empty lines and those that begin with # are skipped.

        Raises UserError for a key that is too short, or a repeated name.
        """
        digests: dict[str, bytes] = {}
        lines = [line.strip() for line in text.splitlines()]
        for line in filter(lambda line: line and not line.startswith("#"), lines):
            name, colon, key = line.partition(":")
            if not colon or not _NAME.fullmatch(name.strip()):
                name, key = f"key{len(digests) + 1}", line
            name, key = name.strip(), key.strip()
            if len(key) < _LEAST_LENGTH:
                raise UserError(f"{source} has {len(key)} characters in a key; one needs {_LEAST_LENGTH} or more")
            if name in digests:
                raise UserError(f"{source} has two keys named {name}; give each a name of its own")
            digests[name] = digest_of(key)
        if not digests:
            raise UserError(f"{source} has no key; one needs {_LEAST_LENGTH} or more characters")
        return cls(digests=digests)

    def owner(self, authorization: list[bytes]) -> str | None:
        """Return the name of the key in the `Authorization` headers of a request; None without a valid one."""
        if len(authorization) != 1 or not authorization[0].lower().startswith(b"bearer "):
            return None
        sent, found = hashlib.sha256(authorization[0][7:].strip()).digest(), None
        # Compare all keys, so that the time does not depend on the key sent.
        for name, digest in self.digests.items():
            if hmac.compare_digest(sent, digest):
                found = name
        return found


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key."""
    return hashlib.sha256(key.encode()).digest()


def are_explicit() -> bool:
    """Return whether the environment gives the keys, instead of a file that d1 created."""
    # An empty D1_API_KEYS_FILE counts as unset: containers cannot unset a variable.
    return bool(os.environ.get(KEYS_FILE_VARIABLE)) or TOKEN_VARIABLE in os.environ


def own_key(directory: Path) -> str | None:
    """Return the key that d1 created; None if the user set the keys."""
    if are_explicit():
        return None
    text = (directory / TOKEN_FILE).read_text(encoding="utf-8").strip()
    return text if _MADE.fullmatch(text) else None


def read_keys(directory: Path) -> ApiKeys:
    """Read the keys from the environment, or else from the token file in `directory`, created if necessary.

    Raises UserError if they cannot be read or are too short.
    """
    if path := os.environ.get(KEYS_FILE_VARIABLE):
        return ApiKeys.of(_text_of(Path(path), f"{KEYS_FILE_VARIABLE} {path}"), path)
    if TOKEN_VARIABLE in os.environ:
        return ApiKeys.of(os.environ[TOKEN_VARIABLE], TOKEN_VARIABLE)
    own = directory / TOKEN_FILE
    try:
        descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    except OSError as error:
        raise UserError(f"cannot write {own}: {reason(error)}; set {TOKEN_VARIABLE}") from error
    else:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    # Users who share a run use the key of the first of them, who owns the file.
    return ApiKeys.of(_text_of(own, str(own), f"; set {TOKEN_VARIABLE}"), str(own))


def _text_of(path: Path, called: str, advice: str = "") -> str:
    try:
        return decode_text(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {called}: {reason(error)}{advice}") from error
    except ValueError as error:
        raise UserError(f"cannot read {called}: it is not UTF-8{advice}") from error


class SharedCounts:
    """Counts on Redis, which all ingresses of a service share."""

    def __init__(self, redis_url: str, name: str) -> None:
        """Create the counts of the service `name`, which connect when they are first used."""
        self._pool = BlockingConnectionPool.from_url(
            redis_url,
            max_connections=_MAX_CONNECTIONS,
            timeout=_TIMEOUT_S,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
        )
        storage = RedisStorage(
            f"async+{redis_url}",
            wrap_exceptions=True,
            implementation="redispy",
            key_prefix=f"d1:{name}:rates",
            # Documented, but missing in its type.
            connection_pool=self._pool,  # type: ignore[arg-type]
        )
        self.limiter = SlidingWindowCounterRateLimiter(storage)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._pool.aclose()


class RateLimits:
    """Rate limit of each key."""

    def __init__(self, limit: str, shared: SharedCounts | None = None) -> None:
        """Limit each key.

        Args:
            limit: in the notation of the package `limits`, such as "600/minute".
            shared: counts of all ingresses; while they are unreachable, each ingress counts separately.

        Raises:
            ValueError: the limit is invalid.
        """
        self._limit: RateLimitItem = parse(limit)
        # The synchronous storage starts a thread for each request.
        self._own = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._shared = shared
        self._is_away, self._away_until = False, 0.0

    async def refusal(self, owner: str) -> ServiceError | None:
        """Count a request. Returns the error if it exceeds the limit."""
        if self._shared is not None and time.monotonic() >= self._away_until:
            if self._is_away:
                # This request tries again; the others do not wait for it.
                self._away_until = time.monotonic() + _RETRY_S
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    refusal = await self._counted(self._shared.limiter, owner)
            except (StorageError, TimeoutError) as error:
                self._away_until = time.monotonic() + _RETRY_S
                if not self._is_away:
                    structlog.get_logger().warning("rates_counted_alone", error=f"{type(error).__name__}: {error}")
                self._is_away = True
            else:
                self._is_away, self._away_until = False, 0.0
                return refusal
        return await self._counted(self._own, owner)

    async def aclose(self) -> None:
        """Close the connections of the shared counts."""
        if self._shared is not None:
            await self._shared.aclose()

    async def _counted(self, limiter: SlidingWindowCounterRateLimiter, owner: str) -> ServiceError | None:
        if await limiter.hit(self._limit, owner):
            return None
        window = await limiter.get_window_stats(self._limit, owner)
        reset_s = window.reset_time - time.time()
        retry_after_s = max(1, min(60, round(reset_s)))
        return ServiceError(429, f"This key may ask {self._limit}.", "rate_limit_exceeded", retry_after_s=retry_after_s)
