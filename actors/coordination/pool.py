"""Pool of actors, samplers or graders: assignment, health, resizing and utilization."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.coordination.liveness import START_S
from actors.coordination.reporting.status import SILENT_S, Assignment
from actors.coordination.reporting.timeline import WorkSpan
from actors.messages import WorkUnitKey

RESTART_POLL_S = 0.5
# A free actor releases its memory in much less.
_RELEASE_TIMEOUT_S = 10.0
# An actor that has just answered is not probed: that saves half of all calls, and half of the overhead of a short
# round. If it died meanwhile, the work unit loses an attempt.
_FRESH_S = 1.0
# The coordinator collects them every two seconds.
_MAX_SPANS = 2000


@dataclass(frozen=True, eq=False, slots=True)
class Member:
    """An actor of a pool."""

    name: str
    """`sampler 1`."""
    actor: Any
    """Its handle."""


class ActorPool:
    """Actors of one kind, with a priority queue for free ones.

    Work with the earliest `due` is served first. Of two rounds that is the older one, which may have retries or
    replacements.
    """

    def __init__(self, kind: str, actors: Mapping[str, Any], timeout_s: float, on_left: Callable[[str], None]) -> None:
        """Take over actor handles, by name. `on_left` receives the name of an actor that left; its process is ended."""
        self.kind, self.timeout_s, self._on_left = kind, timeout_s, on_left
        self.members = [Member(name, actor) for name, actor in actors.items()]
        self._free = deque(self.members)
        self._leaving: set[Member] = set()
        self._waiting: list[tuple[float, int, int, asyncio.Future[Member]]] = []
        self._num_waited = 0
        self._assigned: dict[Member, tuple[WorkUnitKey, float]] = {}
        self._unreachable: dict[Member, float] = {}
        self._spans: deque[WorkSpan] = deque(maxlen=_MAX_SPANS)
        self._answered: dict[Member, float] = {}
        self._num_busy = 0
        self._busy_s, self._offered_s, self._counted_at = 0.0, 0.0, time.monotonic()
        self._returning: set[asyncio.Task[None]] = set()

    @property
    def staying(self) -> list[str]:
        """Names of the actors that are not about to leave."""
        return [member.name for member in self.members if member not in self._leaving]

    @property
    def leaving(self) -> list[str]:
        """Names of the actors that leave as soon as they are free."""
        return [member.name for member in self._leaving]

    def up(self) -> list[Member]:
        """Return the reachable actors. Calls to an actor without a place yet would pile up, and run one by one."""
        return [member for member in self.members if member not in self._unreachable]

    def outage_s(self) -> float:
        """Return for how many seconds no actor of the pool has been up; 0 if one is."""
        if len(self._unreachable) < len(self.members):
            return 0.0
        return time.monotonic() - max(self._unreachable.values(), default=time.monotonic())

    def grow(self, actors: Mapping[str, Any]) -> None:
        """Add actors, by name. Each is free once it answers: the cluster may have no room for it yet."""
        known = {member.name for member in self.members}
        for name, actor in actors.items():
            if name not in known:
                self._count(0)
                self.members.append(member := Member(name, actor))
                self._await_return(member)

    def shrink(self, size: int) -> None:
        """Retire surplus actors: first unreachable ones, then the newest, each when its work is done."""
        staying = [member for member in self.members if member not in self._leaving]
        by_use = staying[::-1]
        by_use.sort(key=lambda member: member not in self._unreachable)
        for member in by_use[: max(0, len(staying) - size)]:
            self._leaving.add(member)
            if member in self._unreachable or member in self._free:
                self._leave(member)

    def _leave(self, member: Member) -> None:
        self._count(0)
        self.members.remove(member)
        self._leaving.discard(member)
        self._unreachable.pop(member, None)
        self._answered.pop(member, None)
        if member in self._free:
            self._free.remove(member)
        ray.kill(member.actor)
        self._on_left(member.name)

    async def take(self, key: WorkUnitKey, due: float) -> Member:
        """Wait for a free actor, and assign the work unit to it. `due` is the round that needs it."""
        while True:
            member = await self._next_free(key, due)
            self._count(1)
            self._assigned[member] = key, time.monotonic()
            if time.monotonic() - self._answered.get(member, -_FRESH_S) < _FRESH_S:
                return member
            is_up = False
            try:
                async with asyncio.timeout(SILENT_S):
                    await member.actor.ready.options(concurrency_group="liveness").remote()
                is_up = True
            except (RayError, TimeoutError):
                # It died while it was free, or is still starting: not an attempt at the work unit.
                continue
            finally:
                if not is_up:
                    self.give_back(member, is_healthy=False)
            return member

    async def _next_free(self, key: WorkUnitKey, due: float) -> Member:
        if self._free:
            return self._free.popleft()
        self._num_waited += 1
        free: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (due, key.index, self._num_waited, free))
        try:
            return await free
        except asyncio.CancelledError:
            # It may have got an actor in the same iteration of the event loop.
            if free.done() and not free.cancelled():
                self._set_free(free.result())
            raise

    def _set_free(self, member: Member) -> None:
        if member in self._leaving:
            return self._leave(member)
        while self._waiting:
            *_, free = heappop(self._waiting)
            if not free.done():
                return free.set_result(member)
        return self._free.append(member)

    def assignments(self) -> list[Assignment]:
        """Return the current assignment of each busy actor."""
        now = time.monotonic()
        return [
            Assignment(actor=member.name, key=key, seconds=now - since)
            for member, (key, since) in self._assigned.items()
        ]

    def give_back(self, member: Member, *, is_healthy: bool) -> None:
        """End the assignment of an actor. An unhealthy one is free once it answers."""
        self._count(-1)
        key, began = self._assigned.pop(member)
        self._note(member, key, began, is_done=is_healthy)
        if is_healthy:
            self._answered[member] = time.monotonic()
            self._set_free(member)
            return None
        self._answered.pop(member, None)
        if member in self._leaving:
            return self._leave(member)
        return self._await_return(member)

    def use(self) -> dict[str, float]:
        """Return the utilization since the last call.

        `size` is the number of actors, `away` that of unreachable ones, and `busy` the share of the actors' time that
        was spent on work, 0 to 1.
        """
        self._count(0)
        busy = self._busy_s / self._offered_s if self._offered_s else 0.0
        self._busy_s = self._offered_s = 0.0
        return {"size": len(self.members), "away": len(self._unreachable), "busy": round(min(busy, 1.0), 3)}

    def unreachable(self) -> dict[str, float]:
        """Return the unreachable actors, and for how many seconds they have been so."""
        now = time.monotonic()
        return {member.name: now - since for member, since in self._unreachable.items()}

    def take_spans(self) -> list[WorkSpan]:
        """Return the time spans recorded since the last call."""
        spans = list(self._spans)
        self._spans.clear()
        return spans

    async def release_device_memory(self) -> list[str]:
        """Make all actors release their device memory. Returns a sentence for each that had to be restarted for it.

        Raises TimeoutError if one is not up again in time.
        """
        said = await asyncio.gather(*map(self._offload, self.members))
        return [what for what in said if what]

    async def _offload(self, member: Member) -> str:
        said = ""
        try:
            async with asyncio.timeout(START_S):
                while True:
                    try:
                        # A restarted actor begins without device memory.
                        await member.actor.ready.options(concurrency_group="liveness").remote()
                        await asyncio.wait_for(member.actor.offload.remote(), _RELEASE_TIMEOUT_S)
                    except (TimeoutError, RayTaskError):
                        said = f"{member.name} did not free its GPU at the end of its turn and was restarted"
                        ray.kill(member.actor, no_restart=False)
                    except RayError:
                        pass  # It died, or is starting.
                    else:
                        return said
                    await asyncio.sleep(RESTART_POLL_S)
        except TimeoutError as error:
            raise TimeoutError(f"{member.name} did not restart within {START_S:.0f} s, and may hold its GPU") from error

    def _note(self, member: Member, key: WorkUnitKey | None, began: float, *, is_done: bool) -> None:
        ended = time.monotonic()
        self._spans.append(WorkSpan(actor=member.name, key=key, began=began, ended=ended, is_done=is_done))

    def _count(self, more: int) -> None:
        now = time.monotonic()
        self._busy_s += self._num_busy * (now - self._counted_at)
        self._offered_s += len(self.members) * (now - self._counted_at)
        self._counted_at = now
        self._num_busy += more

    def _await_return(self, member: Member) -> None:
        """Make an actor free once it answers, after a start or a call that timed out."""
        self._unreachable[member] = time.monotonic()
        # The event loop keeps only weak references to tasks.
        task = asyncio.create_task(self._return(member))
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    async def _return(self, member: Member) -> None:
        """Wait until an actor answers. A call to one that is starting fails at once: if it were free, it would use up
        the attempts of all work units."""
        while member in self._unreachable:
            try:
                await asyncio.wait_for(member.actor.ready.remote(), max(self.timeout_s, START_S))
            except RayError:
                await asyncio.sleep(RESTART_POLL_S)
            except TimeoutError:
                # It answers liveness probes, but hangs in the call that timed out.
                ray.kill(member.actor, no_restart=False)
            else:
                # It may have left meanwhile.
                if (since := self._unreachable.pop(member, None)) is not None:
                    self._note(member, None, since, is_done=False)
                    self._set_free(member)
                return
