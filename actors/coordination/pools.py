"""The sampler pool and the grader pool, as the coordinator drives them: one try of one portion at a time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.coordination.liveness import START_S
from actors.messages import Generation, Portion, PortionKey, PortionSummary
from actors.weights.store import VersionMissingError
from rewards import RewardUnavailableError

_RESTART_POLL_S = 0.5
# An actor that is free gives its memory back in much less.
_SLEEP_TIMEOUT_S = 10.0
# Who has just answered is not asked whether it is up: that is half of all calls, and of what a short round costs beside
# its work. If it died meanwhile, the portion loses a try.
_FRESH_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
# The coordinator asks for them every two seconds.
_MAX_WORKS = 2000


class PortionFailedError(Exception):
    """A try of a portion failed; says why."""


class VersionLostError(Exception):
    """The weight store does not have the version that a portion is sampled from; says which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What an actor of a pool is at work on."""

    actor: str
    """Its name: `sampler 1`."""
    key: PortionKey
    """The portion."""
    seconds: float
    """For how long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What an actor of a pool did, from when to when."""

    actor: str
    """Its name: `sampler 1`."""
    key: PortionKey | None
    """The portion that it had; None where it was away."""
    began: float
    """By `time.monotonic`."""
    ended: float
    """By the same."""
    is_done: bool
    """Whether it answered; else the try failed or was given up, or it was away."""


@dataclass(frozen=True, eq=False, slots=True)
class _Member:
    name: str
    actor: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolUse:
    """How a pool has fared since it was last asked."""

    size: int
    """Its actors."""
    away: int
    """Those of them that do not answer now: they are restarting, or still at a call that was given up."""
    busy: float
    """Share of the actors' time that they were at work, 0 to 1."""


class _Pool:
    """Actors of one kind, and who of them is free.

    What the learner waits for is served first: an evaluation, then the older round, in which there may be portions that
    are tried again or that replace others.
    """

    def __init__(self, kind: str, actors: Sequence[Any], timeout_s: float) -> None:
        self.kind, self.timeout_s, self._size = kind, timeout_s, len(actors)
        self.members = [_Member(f"{kind} {index}", actor) for index, actor in enumerate(actors)]
        self._free = deque(self.members)
        self._waiting: list[tuple[int, int, int, asyncio.Future[_Member]]] = []
        self._num_waited = 0
        self._assigned: dict[_Member, tuple[PortionKey, float]] = {}
        self._away: dict[_Member, float] = {}
        self._works: deque[Work] = deque(maxlen=_MAX_WORKS)
        self._answered: dict[_Member, float] = {}
        self._num_busy = 0
        self._busy_s, self._counted_at = 0.0, time.monotonic()
        self._asked_at = self._counted_at
        self._returning: set[asyncio.Task[None]] = set()

    async def take(self, key: PortionKey) -> _Member:
        """A free actor, which is at work on the portion from now on."""
        while True:
            member = await self._next_free(key)
            self._count(1)
            self._assigned[member] = key, time.monotonic()
            if time.monotonic() - self._answered.get(member, -_FRESH_S) < _FRESH_S:
                return member
            is_up = False
            try:
                await member.actor.ready.options(concurrency_group="liveness").remote()
                is_up = True
            except RayError:
                # It died while it was free, or is still starting: no try of the portion.
                continue
            finally:
                if not is_up:
                    self.give_back(member, is_healthy=False)
            return member

    async def _next_free(self, key: PortionKey) -> _Member:
        if self._free:
            return self._free.popleft()
        self._num_waited += 1
        free: asyncio.Future[_Member] = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (key.round, key.index, self._num_waited, free))
        try:
            return await free
        except asyncio.CancelledError:
            # It may have been served in the same turn.
            if free.done() and not free.cancelled():
                self._set_free(free.result())
            raise

    def _set_free(self, member: _Member) -> None:
        while self._waiting:
            *_, free = heappop(self._waiting)
            if not free.done():
                free.set_result(member)
                return
        self._free.append(member)

    def assignments(self) -> list[Assignment]:
        """Who is at work on what."""
        now = time.monotonic()
        return [
            Assignment(actor=member.name, key=key, seconds=now - since)
            for member, (key, since) in self._assigned.items()
        ]

    def give_back(self, member: _Member, *, is_healthy: bool) -> None:
        """An actor is at work no more; one that is not healthy is free once it answers."""
        self._count(-1)
        key, began = self._assigned.pop(member)
        self._note(member, key, began, is_done=is_healthy)
        if is_healthy:
            self._answered[member] = time.monotonic()
            self._set_free(member)
            return
        self._answered.pop(member, None)
        # The event loop itself does not hold a task until it is done.
        task = asyncio.create_task(self._await_return(member))
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    def use(self) -> PoolUse:
        """Since the last call."""
        self._count(0)
        seconds = self._counted_at - self._asked_at
        busy = self._busy_s / (self._size * seconds) if seconds else 0.0
        self._busy_s, self._asked_at = 0.0, self._counted_at
        return PoolUse(size=self._size, away=len(self._away), busy=round(min(busy, 1.0), 3))

    def away(self) -> dict[str, float]:
        """Who does not answer, and for how many seconds."""
        now = time.monotonic()
        return {member.name: now - since for member, since in self._away.items()}

    def take_works(self) -> list[Work]:
        """What was done since the last call."""
        works = list(self._works)
        self._works.clear()
        return works

    async def sleep(self) -> list[str]:
        """Have all actors give the memory of their devices back. Returns who had to be restarted for it, in sentences.

        Raises TimeoutError where one is not up again in time.
        """
        said = await asyncio.gather(*map(self._put_to_sleep, self.members))
        return [what for what in said if what]

    async def _put_to_sleep(self, member: _Member) -> str:
        said = ""
        try:
            async with asyncio.timeout(START_S):
                while True:
                    try:
                        # One that restarts begins asleep.
                        await member.actor.ready.options(concurrency_group="liveness").remote()
                        await asyncio.wait_for(member.actor.sleep.remote(), _SLEEP_TIMEOUT_S)
                    except (TimeoutError, RayTaskError):
                        said = f"{member.name} did not go to sleep at its turn's end and was restarted"
                        ray.kill(member.actor, no_restart=False)
                    except RayError:
                        pass  # It died, or is starting.
                    else:
                        return said
                    await asyncio.sleep(_RESTART_POLL_S)
        except TimeoutError as error:
            raise TimeoutError(
                f"{member.name} was not up again within {START_S:.0f} s, and may hold its GPU"
            ) from error

    def _note(self, member: _Member, key: PortionKey | None, began: float, *, is_done: bool) -> None:
        ended = time.monotonic()
        self._works.append(Work(actor=member.name, key=key, began=began, ended=ended, is_done=is_done))

    def _count(self, more: int) -> None:
        now = time.monotonic()
        self._busy_s += self._num_busy * (now - self._counted_at)
        self._counted_at = now
        self._num_busy += more

    async def _await_return(self, member: _Member) -> None:
        """After a restart, or after the call that nobody waits for any more.

        A call to an actor that is restarting fails at once; were it free, it would use up the tries of every portion.
        """
        self._away[member] = time.monotonic()
        while True:
            try:
                await asyncio.wait_for(member.actor.ready.remote(), max(self.timeout_s, START_S))
            except RayError:
                await asyncio.sleep(_RESTART_POLL_S)
            except TimeoutError:
                # It answers whether it lives, and hangs at the call that was given up.
                ray.kill(member.actor, no_restart=False)
            else:
                self._note(member, None, self._away.pop(member), is_done=False)
                return self._set_free(member)


class Pools:
    """The samplers and the graders."""

    def __init__(
        self,
        samplers: Sequence[Any],
        graders: Sequence[Any],
        sampling_timeout_s: float,
        grading_timeout_s: float,
        on_pause: Callable[[str | None], None],
    ) -> None:
        """Take over actor handles; a call that takes longer than its timeout kills (and so restarts) its actor.

        `on_pause` is told why grading pauses, once, and None when it goes on.
        """
        self._samplers = _Pool("sampler", samplers, sampling_timeout_s)
        self._graders = _Pool("grader", graders, grading_timeout_s)
        self._on_pause = on_pause
        self._num_paused = 0

    @property
    def is_paused(self) -> bool:
        """Whether grading waits for something that does not answer: a judge, an endpoint."""
        return self._num_paused > 0

    def use(self) -> dict[str, dict[str, float]]:
        """How each pool has fared since the last call: the fields of `PoolUse`."""
        return {f"{pool.kind}s": asdict(pool.use()) for pool in (self._samplers, self._graders)}

    def members(self) -> dict[str, Any]:
        """The actors of both pools by name."""
        return {member.name: member.actor for pool in (self._samplers, self._graders) for member in pool.members}

    def assignments(self) -> list[Assignment]:
        """Who of both is at work on what."""
        return [*self._samplers.assignments(), *self._graders.assignments()]

    def away(self) -> dict[str, float]:
        """Who of both does not answer, and for how many seconds."""
        return self._samplers.away() | self._graders.away()

    def stage(self, generation: Generation) -> None:
        """Have the samplers fetch weights beside what they are at: what they start next is likely to be of these."""
        for member in self._samplers.members:
            # Nobody waits for it: one that has not fetched them does so when it is asked for a portion.
            member.actor.stage.options(concurrency_group="weights").remote(generation)

    async def end_turn(self) -> list[str]:
        """Have the samplers sleep, who share GPUs with the learner. Returns and raises as `_Pool.sleep` does."""
        return await self._samplers.sleep()

    def take_works(self) -> list[Work]:
        """What the actors of both did since the last call."""
        return [*self._samplers.take_works(), *self._graders.take_works()]

    async def score(
        self, generation: Generation, key: PortionKey, make: Callable[[], Portion]
    ) -> tuple[ray.ObjectRef[Any], PortionSummary]:
        """Sample and grade a portion with the weights of one generation; it is made when a sampler is free, for
        thousands may wait.

        Returns the reference of the scored portion, which travels to the learner past this process, and its summary.
        Raises PortionFailedError, and VersionLostError where the weights are nowhere.
        """
        made: list[Portion] = []

        def generate(sampler: Any) -> Any:
            made.append(make())
            return sampler.generate.options(num_returns=2).remote(generation, made[0])

        completions, _ = await _call(self._samplers, key, generate)
        graded = await self._graded(made[0], completions)
        return graded[0], graded[1]

    async def _graded(self, portion: Portion, completions: Any) -> tuple[Any, Any]:
        """Grade, once what a reward depends on answers, however long that takes: it is no failure of the portion."""
        pause_s, is_waiting = _FIRST_PAUSE_S, False
        grade = partial(_grade, portion, completions)
        try:
            while True:
                try:
                    return await _call(self._graders, portion.key, grade)
                except RewardUnavailableError as error:
                    if not is_waiting:
                        is_waiting = True
                        self._pause(str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            if is_waiting:
                self._go_on()

    def _pause(self, why: str) -> None:
        self._num_paused += 1
        if self._num_paused == 1:
            self._on_pause(why)

    def _go_on(self) -> None:
        self._num_paused -= 1
        if not self._num_paused:
            self._on_pause(None)


def _grade(portion: Portion, completions: Any, grader: Any) -> Any:
    return grader.grade.options(num_returns=2).remote(portion, completions)


async def _call(pool: _Pool, key: PortionKey, ask: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Ask a free actor; returns the reference of its first return and the value of its second."""
    member = await pool.take(key)
    is_healthy = False
    try:
        payload, small = ask(member.actor)
        value = await asyncio.wait_for(small, pool.timeout_s)
        is_healthy = True
    except RayTaskError as error:
        if isinstance(error.cause, RewardUnavailableError):
            is_healthy = True
            raise error.cause from None
        if isinstance(error.cause, VersionMissingError):
            is_healthy = True
            raise VersionLostError(str(error.cause)) from None
        raise _failed(pool.kind, error) from error
    except RayError as error:
        raise _failed(pool.kind, error) from error
    except TimeoutError as error:
        # Ours: one that the actor raised is a RayTaskError too.
        ray.kill(member.actor, no_restart=False)
        raise PortionFailedError(
            f"a {pool.kind} did not answer within {pool.timeout_s:.0f} s and was restarted"
        ) from error
    finally:
        pool.give_back(member, is_healthy=is_healthy)
    return payload, value


def _failed(kind: str, error: RayError) -> PortionFailedError:
    lines = str(error).strip().splitlines()
    return PortionFailedError(f"a {kind} failed: {lines[-1] if lines else type(error).__name__}")
