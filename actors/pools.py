"""The sampler pool and the grader pool, as the coordinator drives them: one try of one portion at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.messages import Generation, Portion, PortionSummary
from rewards import RewardUnavailableError

_RESTART_POLL_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class PortionFailedError(Exception):
    """A try of a portion failed; says why."""


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
    """Actors of one kind, and who of them is free. Who waits first is served first."""

    def __init__(self, kind: str, actors: Sequence[Any], timeout_s: float) -> None:
        self.kind, self.timeout_s, self._size = kind, timeout_s, len(actors)
        self._free: asyncio.Queue[Any] = asyncio.Queue()
        for actor in actors:
            self._free.put_nowait(actor)
        self._num_busy = self._num_away = 0
        self._busy_s, self._counted_at = 0.0, time.monotonic()
        self._asked_at = self._counted_at
        self._returning: set[asyncio.Task[None]] = set()

    async def take(self) -> Any:
        """A free actor, which is at work from now on."""
        actor = await self._free.get()
        self._count(1)
        return actor

    def give_back(self, actor: Any, *, is_healthy: bool) -> None:
        """An actor is at work no more; one that is not healthy is free once it answers."""
        self._count(-1)
        if is_healthy:
            self._free.put_nowait(actor)
            return
        # The event loop itself does not hold a task until it is done.
        task = asyncio.create_task(self._await_return(actor))
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    def use(self) -> PoolUse:
        """Since the last call."""
        self._count(0)
        seconds = self._counted_at - self._asked_at
        busy = self._busy_s / (self._size * seconds) if seconds else 0.0
        self._busy_s, self._asked_at = 0.0, self._counted_at
        return PoolUse(size=self._size, away=self._num_away, busy=round(min(busy, 1.0), 3))

    def _count(self, more: int) -> None:
        now = time.monotonic()
        self._busy_s += self._num_busy * (now - self._counted_at)
        self._counted_at = now
        self._num_busy += more

    async def _await_return(self, actor: Any) -> None:
        """After a restart, or after the call that nobody waits for any more.

        A call to an actor that is restarting fails at once; were it free, it would use up the tries of every portion.
        """
        self._num_away += 1
        while True:
            try:
                await actor.ready.remote()
            except RayError:
                await asyncio.sleep(_RESTART_POLL_S)
            else:
                self._num_away -= 1
                return self._free.put_nowait(actor)


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

    async def score(self, generation: Generation, portion: Portion) -> tuple[ray.ObjectRef[Any], PortionSummary]:
        """Sample and grade a portion with the weights of one generation.

        Returns the reference of the scored portion, which travels to the learner past this process, and its summary.
        Raises PortionFailedError.
        """
        completions = await _call(self._samplers, _generate, generation, portion)
        graded = await self._graded(portion, completions[0])
        return graded[0], graded[1]

    async def _graded(self, portion: Portion, completions: Any) -> tuple[Any, Any]:
        """Grade, once what a reward depends on answers, however long that takes: it is no failure of the portion."""
        pause_s, is_waiting = _FIRST_PAUSE_S, False
        try:
            while True:
                try:
                    return await _call(self._graders, _grade, portion, completions)
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


def _generate(sampler: Any, generation: Generation, portion: Portion) -> Any:
    return sampler.generate.options(num_returns=2).remote(generation, portion)


def _grade(grader: Any, portion: Portion, completions: Any) -> Any:
    return grader.grade.options(num_returns=2).remote(portion, completions)


async def _call(pool: _Pool, method: Any, *arguments: Any) -> tuple[Any, Any]:
    """Call a free actor; returns the reference of its first return and the value of its second."""
    actor = await pool.take()
    is_healthy = False
    try:
        payload, small = method(actor, *arguments)
        value = await asyncio.wait_for(small, pool.timeout_s)
        is_healthy = True
    except TimeoutError as error:
        ray.kill(actor, no_restart=False)
        raise PortionFailedError(
            f"a {pool.kind} did not answer within {pool.timeout_s:.0f} s and was restarted"
        ) from error
    except RayTaskError as error:
        if isinstance(error.cause, RewardUnavailableError):
            is_healthy = True
            raise error.cause from None
        raise _failed(pool.kind, error) from error
    except RayError as error:
        raise _failed(pool.kind, error) from error
    finally:
        pool.give_back(actor, is_healthy=is_healthy)
    return payload, value


def _failed(kind: str, error: RayError) -> PortionFailedError:
    lines = str(error).strip().splitlines()
    return PortionFailedError(f"a {kind} failed: {lines[-1] if lines else type(error).__name__}")
