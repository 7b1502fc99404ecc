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

from deploy.service.contract import Backend, Began, EngineLostError, Event, Job, Refused, is_last

MAX_LOST = 8
"""Engines that a job may lose: after that many, the job itself may be what ends them."""
_PAUSE_S = 0.25
# The engine that receives the rest of an expired job reports the timeout.
_LEAST_S = 0.001


class _VersionGoneError(Exception):
    """No engine has the version that a job began with."""


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
    rest, num_lost = job, 0
    while num_lost < MAX_LOST:
        try:
            rest = replace(rest, timeout_s=max(_LEAST_S, ends_s - time.monotonic()))
            # Closed as soon as the client disconnects, not when it is collected: the slots wait for it.
            async with aclosing(_attempt(backend, rest)) as events:
                async for event in events:
                    is_repeated = isinstance(event, Began) and rest.began_with is not None
                    rest = rest.after(event)
                    if not is_repeated:
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
                message = f"The engine died, and policy version {error} is on no other; ask again."
                yield Refused(status=503, code="version_gone", message=message)
                return
            rest, num_lost = job, num_lost + 1
    yield Refused(
        status=503,
        code="engine_unavailable",
        message="No engine could finish this request; try again.",
        retry_after_s=5,
    )


async def _attempt(backend: Backend, job: Job) -> AsyncGenerator[Event]:
    """Yield the events of one engine. Raises if it does not finish the job."""
    async with aclosing(backend.stream(job)) as stream:
        async for events in stream:
            for event in events:
                if isinstance(event, Refused) and event.code == "model_not_found" and job.began_with is not None:
                    raise _VersionGoneError(job.began_with.version)
                yield event
                if is_last(event):
                    return
    raise EngineLostError("its events ended early")
