"""The samplers' turn: the time in which the learner waits for completions, and when it ends early.

Where samplers and learner share GPUs (`gpus.colocate`), the learner is offloaded to host memory before it asks, and the
turn ends once the samplers have released their device memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from actors.coordination.pools import Pools
from actors.coordination.rounds import OpenRounds

ROUND, EVALUATION = "the round", "the evaluation"
"""What the learner waits for."""
T = TypeVar("T")


class StoppedError(Exception):
    """The run is to stop before the awaited result is there."""


class SamplersTurn:
    """The samplers' turns of a run, one at a time."""

    def __init__(
        self, rounds: OpenRounds, pools: Pools, on_failure: Callable[[str, int], None], *, is_colocated: bool
    ) -> None:
        """Begin outside a turn. `on_failure` receives which sampler had to be restarted to release its memory."""
        self._rounds, self._pools, self._on_failure, self._is_colocated = rounds, pools, on_failure, is_colocated
        self._stopping = asyncio.Event()
        self._requests: set[asyncio.Task[Any]] = set()
        self.waiting_since: tuple[str, float] | None = None
        """What the learner waits for, and since when by `time.monotonic`; None outside a turn."""

    @property
    def is_stopping(self) -> bool:
        """Whether the run is to stop."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """End all waits, now and later: the run is to stop."""
        self._stopping.set()

    def cancel(self) -> None:
        """End the current waits: a restarted learner repeats its request."""
        for request in self._requests:
            request.cancel()

    @asynccontextmanager
    async def taken(self, what: str) -> AsyncIterator[None]:
        """Give the samplers their turn while the learner waits for `what`."""
        self.waiting_since = what, time.monotonic()
        try:
            yield
        finally:
            try:
                await self.end()
            finally:
                self.waiting_since = None

    async def end(self) -> None:
        """Make samplers that share GPUs with the learner release their device memory."""
        if not self._is_colocated:
            return
        if self.is_stopping:
            # Work in flight would start again as soon as a sampler is up.
            self._rounds.forget()
        for what in await self._pools.end_turn():
            self._on_failure(what, 1)

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Cancels it and raises StoppedError if the run is to stop."""
        task, stop = asyncio.create_task(work), asyncio.create_task(self._stopping.wait())
        self._requests.add(task)
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                return task.result()
            raise StoppedError
        finally:
            self._requests.discard(task)
            task.cancel()
            stop.cancel()
