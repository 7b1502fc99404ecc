"""An engine with its versions, as an ingress asks it. It knows no Ray and no HTTP."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from actors.registry.records import BASE, BEST, DEFAULT_ADMIN_STATE
from deploy.service.contract import Began, CanvasSeen, EngineState, Event, FollowerStatus, Job, Refused, num_open_after
from deploy.service.engine.engine import BusyError, Engine
from deploy.service.engine.loaded_version import LoadedVersion, NoRoomError, NoSuchVersionError, RefusedVersionError
from deploy.service.engine.versions import Versions


class EngineHost:
    """One engine and its versions."""

    def __init__(
        self,
        versions: Versions,
        engine: Engine,
        *,
        replica: str = "local",
        follower_status: Callable[[], FollowerStatus] | None = None,
    ) -> None:
        self.versions, self.engine, self._replica = versions, engine, replica
        self._follower_status = follower_status or _no_follower

    async def stream(self, job: Job) -> AsyncGenerator[list[Event]]:
        """As `Backend.stream`. Left early, the job's slots are free at the next step."""
        found = await self._acquire(job)
        if isinstance(found, Refused):
            yield [found]
            return
        mailbox = Mailbox(asyncio.get_running_loop())
        try:
            ticket = self.engine.submit(job, found, mailbox.put)
        except (BusyError, ValueError) as error:
            self.versions.release(found)
            yield [_refusal(error)]
            return
        try:
            first: list[Event] = [Began(policy=found.policy)]
            if job.tells_blocks:
                yield first
                first = []
            num_left = len(job.requests)
            while num_left:
                events = first + await mailbox.take()
                first = []
                num_left = num_open_after(events, num_left)
                yield events
        finally:
            self.engine.cancel(ticket)

    async def states(self) -> list[EngineState]:
        """As `Backend.states`."""
        return [self.state()]

    async def aclose(self) -> None:
        """As `Backend.aclose`: there is nothing."""

    def state(self) -> EngineState:
        """How it stands."""
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
            follower=self._follower_status(),
        )

    async def _acquire(self, job: Job) -> LoadedVersion | Refused:
        versions, wanted = self.versions, job.wanted
        try:
            if job.began_with is None and (live := versions.acquire_live(wanted)) is not None:
                return live
            # It may have to be loaded, which takes its time.
            loading = asyncio.ensure_future(asyncio.to_thread(versions.acquire, wanted, job.began_with))
            try:
                return await asyncio.shield(loading)
            except asyncio.CancelledError:
                # The thread goes on, and what it acquires is nobody's.
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
    """Events from the engine's thread to one reader on an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._events, self._has_some = loop, deque[Event](), asyncio.Event()

    def put(self, event: Event) -> None:
        """From any thread. A loop that has ended wants nothing more."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._put, event)

    async def take(self) -> list[Event]:
        """All that came, one at least. The engine ends every job in time, so it does not wait for ever."""
        await self._has_some.wait()
        self._has_some.clear()
        events = list(self._events)
        self._events.clear()
        return events

    def _put(self, event: Event) -> None:
        if isinstance(event, CanvasSeen):
            # A reader that is slow sees fewer denoise steps, and the engine keeps none for it.
            of_choice = (one for one in reversed(self._events) if not isinstance(one, Began | Refused))
            last = next((one for one in of_choice if one.choice == event.choice), None)
            if isinstance(last, CanvasSeen):
                self._events.remove(last)
        self._events.append(event)
        self._has_some.set()


def _refusal(error: Exception) -> Refused:
    if isinstance(error, BusyError):
        return error.refusal
    return Refused(status=400, code="invalid_request", message=f"{error}.")


def _no_follower() -> FollowerStatus:
    return FollowerStatus(registry_reachable=True, num_errors=0, last_error=None, admin=DEFAULT_ADMIN_STATE)
