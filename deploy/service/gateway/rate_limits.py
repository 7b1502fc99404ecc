"""Rate limits: how often each key may ask."""

from __future__ import annotations

import asyncio
import time

import structlog
from limits import RateLimitItem, parse
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from limits.errors import StorageError
from redis.asyncio import BlockingConnectionPool

from deploy.service.errors import ServiceError

# A request waits for the count no longer than this.
_TIMEOUT_S = 0.5
_RETRY_S = 5.0
# Of an ingress, for its counts; more requests at a time wait for each other.
_MAX_CONNECTIONS = 16


class SharedCounts:
    """Where every ingress of a service counts together."""

    def __init__(self, redis_url: str, name: str) -> None:
        """Those of the service `name`; connects at the first count."""
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
            # Documented, and not in its type.
            connection_pool=self._pool,  # type: ignore[arg-type]
        )
        self.limiter = SlidingWindowCounterRateLimiter(storage)

    async def aclose(self) -> None:
        """Disconnect."""
        await self._pool.aclose()


class RateLimits:
    """Counts each key's requests."""

    def __init__(self, limit: str, shared: SharedCounts | None = None) -> None:
        """Hold each key to a limit.

        Args:
            limit: as the `limits` package writes it: "600/minute".
            shared: where others count too; while it is away, each counts by itself.

        Raises:
            ValueError: it is no limit.
        """
        self._limit: RateLimitItem = parse(limit)
        # The synchronous storage starts a thread for each request.
        self._own = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._shared = shared
        self._is_away, self._away_until = False, 0.0

    async def refusal(self, owner: str) -> ServiceError | None:
        """Count a request; why it is too much, or None."""
        if self._shared is not None and time.monotonic() >= self._away_until:
            if self._is_away:
                # One tries; the others do not wait for it.
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
        """Count no more."""
        if self._shared is not None:
            await self._shared.aclose()

    async def _counted(self, limiter: SlidingWindowCounterRateLimiter, owner: str) -> ServiceError | None:
        if await limiter.hit(self._limit, owner):
            return None
        window = await limiter.get_window_stats(self._limit, owner)
        reset_s = window.reset_time - time.time()
        retry_after_s = max(1, min(60, round(reset_s)))
        return ServiceError(429, f"This key may ask {self._limit}.", "rate_limit_exceeded", retry_after_s=retry_after_s)
