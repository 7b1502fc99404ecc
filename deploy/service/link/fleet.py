"""Load balancing over the engines of a service, and the pool of connections to them. It knows no Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from deploy.service.contract import EngineLostError, EngineState, Event, Job, NoEngineError
from deploy.service.link.connection import Connection
from deploy.service.link.contact import IDLE_TIMEOUT_S, Contact

_CONNECT_TIMEOUT_S = 2.0
_LOOK_EVERY_S = 1.0
# The engine ends every job in time. Beyond that it is as good as dead.
_GRACE_S = 10.0
# Less than an engine keeps a connection that has no job: none is used that is just closing.
_MOST_IDLE_S = IDLE_TIMEOUT_S / 2


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
    idle: list[tuple[float, Connection]] = field(default_factory=list)
    """Connections without a job, with when the last one ended."""

    async def connect(self) -> Connection:
        """The connection that was used last, or a new one. Raises as `Connection.call`, and TimeoutError."""
        while self.idle:
            ended_s, wire = self.idle.pop()
            if time.monotonic() - ended_s < _MOST_IDLE_S:
                return wire
            await wire.close()
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            return await Connection.call(self.contact.host, self.contact.port, self.contact.secret)

    def keep(self, wire: Connection) -> None:
        """Let the next job have it; those that were not needed for long are closed."""
        while self.idle and time.monotonic() - self.idle[0][0] > _MOST_IDLE_S:
            self.idle.pop(0)[1].abort()
        self.idle.append((time.monotonic(), wire))

    async def leave(self) -> None:
        """Close what is idle."""
        while self.idle:
            await self.idle.pop()[1].close()


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
            wire, is_last = await self._connected(engine), False
            try:
                # Around each wait, since whoever listens may go on in another task.
                async with asyncio.timeout_at(deadline):
                    await wire.send(job)
                while not is_last:
                    async with asyncio.timeout_at(deadline):
                        is_last, events = await wire.receive()
                    paused_s = time.monotonic()
                    yield list(events)
                    # A client that is slow is not the engine's silence.
                    deadline += time.monotonic() - paused_s
            finally:
                if is_last and self._knows(engine):
                    engine.keep(wire)
                else:
                    # That frees the slots.
                    await wire.close()
        except (EOFError, OSError, TimeoutError) as error:
            await self._forget(engine)
            raise EngineLostError(f"{type(error).__name__}: {error}") from error
        finally:
            engine.num_choices -= len(job.requests)

    async def states(self) -> list[EngineState]:
        """As `Backend.states`."""
        if self._engines:
            return await self._directory.states()
        # An ingress that says that it is ready has found them: without Ray's GCS it could not any more.
        _, states = await asyncio.gather(asyncio.shield(self._look()), self._directory.states())
        return states

    async def aclose(self) -> None:
        """As `Backend.aclose`."""
        if self._looking is not None:
            self._looking.cancel()
        engines, self._engines = self._engines, {}
        for engine in engines.values():
            await engine.leave()

    async def _least_busy(self) -> _Engine:
        if not self._engines:
            await asyncio.shield(self._look())
        elif time.monotonic() - self._looked_s > _LOOK_EVERY_S:
            self._look()
        if not self._engines:
            raise NoEngineError("no engine answers")
        engine = min(self._engines.values(), key=lambda one: (one.num_choices, one.last_used))
        self._num_jobs += 1
        engine.last_used = self._num_jobs
        return engine

    async def _connected(self, engine: _Engine) -> Connection:
        try:
            return await engine.connect()
        except (EOFError, OSError, TimeoutError) as error:
            await self._forget(engine)
            raise NoEngineError(f"{type(error).__name__}: {error}") from error

    def _knows(self, engine: _Engine) -> bool:
        return self._engines.get(engine.contact.replica) is engine

    async def _forget(self, engine: _Engine) -> None:
        """It may be dead. If it is not, the next look finds it again."""
        if self._knows(engine):
            del self._engines[engine.contact.replica]
        await engine.leave()

    def _look(self) -> asyncio.Task[None]:
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
            for replica in known.keys() - self._engines.keys():
                await known[replica].leave()
