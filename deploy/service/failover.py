"""Failover at block boundaries: when a job's engine is lost, another engine continues after the last finished block.

Random draws are keyed by seed, step and slot, so the second engine writes what the first one would have written. The
client sees one policy version and no token twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import structlog

from actors.registry.records import PolicyVersion
from deploy.service.contract import (
    Backend,
    Began,
    BlocksDone,
    CanvasSeen,
    Done,
    EngineLostError,
    Event,
    Job,
    Refused,
)
from rollout.request import Committed

MAX_LOST = 8
"""Engines that a job may lose: after that many, the job itself may be what ends them."""
_PAUSE_S = 0.25
# The engine that receives the rest of an expired job reports the timeout.
_LEAST_S = 0.001


async def with_failover(backend: Backend, job: Job, *, may_restart: bool) -> AsyncGenerator[Event]:
    """Yield the events of a job across engine failures: `Began` first, and one `Done` for each choice.

    The last event is the last `Done`, or a `Refused`.

    Args:
        backend: the engines.
        job: the job.
        may_restart: whether the job may start again with another version if its own is gone. Then a second `Began`
            is yielded, and the events before it are void.
    """
    ends_s = time.monotonic() + job.timeout_s
    rest, num_lost = _Rest(job, ends_s), 0
    while num_lost < MAX_LOST:
        try:
            # Closed as soon as the client disconnects, not when it is collected: the slots wait for it.
            async with aclosing(_attempt(backend, rest)) as events:
                async for event in events:
                    yield event
            return
        except EngineLostError as error:
            num_lost += 1
            structlog.get_logger().warning("engine_lost", num_lost=num_lost, error=str(error))
            if time.monotonic() > ends_s:
                break
            # Another engine is usually available immediately.
            await asyncio.sleep(_PAUSE_S * (num_lost - 1))
        except _VersionGoneError as error:
            if not may_restart:
                yield replace(error.refusal, status=503, code="version_gone", message=_gone(rest.policy))
                return
            rest, num_lost = _Rest(job, ends_s), num_lost + 1
    yield Refused(
        status=503,
        code="engine_unavailable",
        message="No engine could finish this request; try again.",
        retry_after_s=5,
    )


async def _attempt(backend: Backend, rest: _Rest) -> AsyncGenerator[Event]:
    """Yield what the client has not received yet, from one engine. Raises if that engine does not finish the job."""
    async with aclosing(backend.stream(rest.job)) as stream:
        async for events in stream:
            for event in events:
                if isinstance(event, Refused) and event.code == "model_not_found" and rest.policy is not None:
                    raise _VersionGoneError(event)
                if (shown := rest.take(event)) is not None:
                    yield shown
                if isinstance(event, Refused) or rest.is_done:
                    return
    raise EngineLostError("its events ended early")


class _VersionGoneError(Exception):
    """No engine has the version that a job began with."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class _Rest:
    """The unfinished part of a job."""

    def __init__(self, job: Job, ends_s: float) -> None:
        self._job, self._ends_s = job, ends_s
        self.policy: PolicyVersion | None = None
        self._open = list(range(len(job.requests)))
        """The unfinished choices."""
        self._asked = self._open
        """The choices of the current attempt, in its order."""
        self._committed: list[list[Committed]] = [
            [] if request.committed is None else [request.committed] for request in job.requests
        ]

    @property
    def is_done(self) -> bool:
        """Whether every choice is finished."""
        return not self._open

    @property
    def job(self) -> Job:
        """The job for the next engine."""
        self._asked = list(self._open)
        left_s = max(_LEAST_S, self._ends_s - time.monotonic())
        if self.policy is None:
            return replace(self._job, timeout_s=left_s)
        requests = tuple(
            replace(self._job.requests[choice], committed=Committed.joined(self._committed[choice]))
            for choice in self._asked
        )
        return replace(self._job, requests=requests, began_with=self.policy, timeout_s=left_s)

    def take(self, event: Event) -> Event | None:
        """Record an event, and return it as the client receives it; None if the client has it already."""
        if isinstance(event, Refused):
            return event
        if isinstance(event, Began):
            is_first, self.policy = self.policy is None, self.policy or event.policy
            return event if is_first else None
        shown: Event = replace(event, choice=self._asked[event.choice])
        if isinstance(shown, BlocksDone):
            self._committed[shown.choice].append(shown.slots)
        elif isinstance(shown, Done):
            self._open.remove(shown.choice)
        else:
            assert isinstance(shown, CanvasSeen), "there are no other events"
        return shown


def _gone(policy: PolicyVersion | None) -> str:
    version = "it began with" if policy is None else f"{policy.version}"
    return f"The engine died, and policy version {version} is on no other; ask again."
