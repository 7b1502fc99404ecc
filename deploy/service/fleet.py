"""The engines of a service, as an ingress reaches them. It knows no Ray: a directory says which engines there are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from deploy.service.listener import END, Contact
from deploy.service.messages import EngineLostError, EngineState, Event, Job
from deploy.service.wire import Wire

_CONNECT_TIMEOUT_S = 2.0
_LOOK_EVERY_S = 1.0
# The engine ends every job in time. Beyond that it is as good as dead.
_GRACE_S = 10.0


class Directory(Protocol):
    """Who knows the engines. What it is asked ends in time; engines that do not answer are left out."""

    async def contacts(self) -> list[Contact]:
        """Where each takes jobs."""
        ...

    async def states(self) -> list[EngineState]:
        """How each stands."""
        ...


@dataclass(slots=True)
class _Engine:
    contact: Contact
    num_choices: int = 0
    """Of the jobs that this ingress has given it."""
    last_used: int = 0


class Fleet:
    """The engines of a directory; jobs go straight to them. For one event loop."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._engines: dict[str, _Engine] = {}
        self._looking: asyncio.Task[None] | None = None
        self._looked_s = float("-inf")
        self._num_jobs = 0

    async def stream(self, job: Job) -> AsyncGenerator[list[Event], None]:
        """As `Backend.stream`."""
        engine = await self._least_busy()
        engine.num_choices += len(job.requests)
        deadline = asyncio.get_running_loop().time() + job.timeout_s + _GRACE_S
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                contact = engine.contact
                wire = await Wire.call(contact.host, contact.port, contact.secret)
            try:
                await wire.send(job)
                while True:
                    # Around each wait, since whoever listens may go on in another task.
                    async with asyncio.timeout_at(deadline):
                        events = await wire.receive()
                    if events == END:
                        return
                    yield list(events)
            finally:
                # Where it has ended this does nothing; else it frees the slots.
                await wire.close()
        except (EOFError, OSError, TimeoutError) as error:
            self._forget(engine)
            raise EngineLostError(f"{type(error).__name__}: {error}") from error
        finally:
            engine.num_choices -= len(job.requests)

    async def states(self) -> list[EngineState]:
        """As `Backend.states`."""
        return await self._directory.states()

    async def _least_busy(self) -> _Engine:
        if not self._engines:
            await self._look()
        elif time.monotonic() - self._looked_s > _LOOK_EVERY_S:
            self._start_to_look()
        if not self._engines:
            raise EngineLostError("no engine answers")
        engine = min(self._engines.values(), key=lambda one: (one.num_choices, one.last_used))
        self._num_jobs += 1
        engine.last_used = self._num_jobs
        return engine

    def _forget(self, engine: _Engine) -> None:
        """It may be dead. If it is not, the next look finds it again."""
        if self._engines.get(engine.contact.replica) is engine:
            del self._engines[engine.contact.replica]

    async def _look(self) -> None:
        await asyncio.shield(self._start_to_look())

    def _start_to_look(self) -> asyncio.Task[None]:
        """Ask which engines there are, unless that is being asked."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._find())
        return self._looking

    async def _find(self) -> None:
        self._looked_s = time.monotonic()
        # Where nobody answers, those that are known may still take jobs.
        if contacts := await self._directory.contacts():
            known = self._engines
            self._engines = {one.replica: known.get(one.replica) or _Engine(one) for one in contacts}
