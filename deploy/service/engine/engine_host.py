"""Engine with its policy versions, as an ingress calls it. It uses neither Ray nor HTTP."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress

from actors.registry.records import BASE, BEST, DEFAULT_ADMIN_STATE
from deploy.service.contract import Began, CanvasSeen, EngineState, Event, FollowerStatus, Job, Refused, is_last
from deploy.service.engine.engine import Engine
from deploy.service.engine.follower import VersionFollower
from deploy.service.engine.versions import LoadedVersion, NoRoomError, NoSuchVersionError, RefusedVersionError, Versions

_NO_FOLLOWER = FollowerStatus(registry_reachable=True, num_errors=0, last_error=None, admin=DEFAULT_ADMIN_STATE)


class EngineHost:
    """An engine and its versions."""

    def __init__(
        self,
        versions: Versions,
        engine: Engine,
        *,
        replica: str = "local",
        follower: VersionFollower | None = None,
    ) -> None:
        self.versions, self.engine, self._replica, self._follower = versions, engine, replica, follower

    async def stream(self, job: Job) -> AsyncGenerator[list[Event]]:
        """See `Backend.stream`. Closing the generator frees the job's slots at the next step."""
        found = await self._acquire(job)
        if isinstance(found, Refused):
            yield [found]
            return
        mailbox = Mailbox(asyncio.get_running_loop())
        running = self.engine.submit(job, found, mailbox.put)
        if isinstance(running, Refused):
            self.versions.release(found)
            yield [running]
            return
        try:
            events: list[Event] = [Began(policy=found.policy)]
            if job.tells_blocks:
                yield events
                events = []
            is_over = False
            while not is_over:
                events += await mailbox.take()
                is_over = is_last(events[-1])
                yield events
                events = []
        finally:
            self.engine.cancel(running)

    async def states(self) -> list[EngineState]:
        """See `Backend.states`."""
        return [self.state()]

    def state(self) -> EngineState:
        """Return the engine's state."""
        versions, engine = self.versions, self.engine
        return EngineState(
            replica=self._replica,
            policy=versions.policy,
            scored=versions.scored,
            announced=versions.announced,
            live=versions.live,
            base=versions.located(BASE),
            best=versions.located(BEST),
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_swaps=versions.num_swaps,
            refused=versions.refused,
            follower=_NO_FOLLOWER if self._follower is None else self._follower.status,
        )

    async def _acquire(self, job: Job) -> LoadedVersion | Refused:
        versions, wanted = self.versions, job.wanted
        try:
            if (live := versions.acquire_live(wanted, job.began_with)) is not None:
                return live
            # It may have to be loaded, which takes seconds.
            loading = asyncio.ensure_future(asyncio.to_thread(versions.acquire, wanted, job.began_with))
            try:
                return await asyncio.shield(loading)
            except asyncio.CancelledError:
                # The thread continues; release what it acquires.
                loading.add_done_callback(self._release)
                raise
        except (NoSuchVersionError, RefusedVersionError) as error:
            return Refused(status=404, code="model_not_found", message=str(error))
        except NoRoomError as error:
            return Refused(status=429, code="overloaded", message=str(error), retry_after_s=5)

    def _release(self, loading: asyncio.Future[LoadedVersion]) -> None:
        if not loading.cancelled() and loading.exception() is None:
            self.versions.release(loading.result())


class Mailbox:
    """Queue of events from the engine's thread to one reader on an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._events, self._has_some = loop, deque[Event](), asyncio.Event()

    def put(self, event: Event) -> None:
        """Add an event, from any thread. Events for a closed loop are dropped."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._put, event)

    async def take(self) -> list[Event]:
        """Wait for at least one event and return all. It ends, because the engine ends every job in time."""
        await self._has_some.wait()
        self._has_some.clear()
        events = list(self._events)
        self._events.clear()
        return events

    def _put(self, event: Event) -> None:
        if isinstance(event, CanvasSeen):
            # A slow reader sees fewer denoise steps; they are not queued.
            of_choice = (one for one in reversed(self._events) if not isinstance(one, Began | Refused))
            last = next((one for one in of_choice if one.choice == event.choice), None)
            if isinstance(last, CanvasSeen):
                self._events.remove(last)
        self._events.append(event)
        self._has_some.set()
