"""Failover: a job outlives its engine, and another one goes on at the last finished block.

Draws are keyed by seed, step and slot, so what the second engine writes is what the first would have written. The
client sees one version and no token twice.
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
    NoEngineError,
    Refused,
)
from rollout.request import Committed

MAX_LOST = 8
"""A job that is lost with so many engines may be what ends them."""
_PAUSE_S = 0.25
_LOOK_EVERY_S = 0.5
# The engine that gets the rest of a job whose time is over says so.
_LEAST_S = 0.001


async def with_failover(backend: Backend, job: Job, *, may_restart: bool) -> AsyncGenerator[Event]:
    """The events of a job, whatever happens to the engines: `Began` first, and `Done` once for each choice.

    The end is the last `Done`, or a `Refused`.

    Args:
        backend: the engines.
        job: what to do.
        may_restart: whether the job may begin again with another version where the one it began with is gone; then a
            second `Began` comes, and what came before it is void.
    """
    ends_s = time.monotonic() + job.timeout_s
    rest, num_lost = _Rest(job, ends_s), 0
    while num_lost < MAX_LOST:
        try:
            # Closed at once when the client goes, not when it is collected: the slots wait for it.
            async with aclosing(_attempt(backend, rest)) as events:
                async for event in events:
                    yield event
            return
        except NoEngineError:
            # One that replaces a dead one has to start and to load the policy first.
            if time.monotonic() > ends_s:
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        except EngineLostError as error:
            num_lost += 1
            structlog.get_logger().warning("engine_lost", num_lost=num_lost, error=str(error))
            # Another engine is there at once, most of the time.
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
    """What the client hears of one engine. Raises where that does not come to the end."""
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
    """The version that a job began with is on no engine any more."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class _Rest:
    """What is left of a job."""

    def __init__(self, job: Job, ends_s: float) -> None:
        self._job, self._ends_s = job, ends_s
        self.policy: PolicyVersion | None = None
        self._open = list(range(len(job.requests)))
        """The choices that are not done."""
        self._asked = self._open
        """Those of the current attempt, in its order."""
        self._committed: list[list[Committed]] = [
            [] if request.committed is None else [request.committed] for request in job.requests
        ]

    @property
    def is_done(self) -> bool:
        """Whether every choice is."""
        return not self._open

    @property
    def job(self) -> Job:
        """What the next engine has to do."""
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
        """Remember an event. What it is for the client: None if that knows it already."""
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
