"""The sampler pool and the grader pool, as the coordinator drives them: one try of one portion at a time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.coordination.pool import ActorPool, Assignment, Work
from actors.coordination.status import SILENT_S
from actors.messages import Generation, Portion, PortionKey, PortionSummary
from actors.weights.store import VersionMissingError
from rewards import RewardUnavailableError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class PortionFailedError(Exception):
    """A try of a portion failed; says why."""


class VersionLostError(Exception):
    """The weight store does not have the version that a portion is sampled from; says which."""


class Pools:
    """The samplers and the graders."""

    def __init__(
        self,
        samplers: Mapping[str, Any],
        graders: Mapping[str, Any],
        sampling_timeout_s: float,
        grading_timeout_s: float,
        *,
        on_pause: Callable[[str | None], None],
        on_left: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Take over actor handles, by name; a call that takes longer than its timeout kills and so restarts its actor.

        `on_pause` is told why the work pauses, once, and None when it goes on; `on_left` who has left a pool.
        """
        self._samplers = ActorPool("sampler", samplers, sampling_timeout_s, on_left)
        self._graders = ActorPool("grader", graders, grading_timeout_s, on_left)
        self._on_pause = on_pause
        self._num_paused = 0
        self._went_on = -math.inf
        self._out: set[ActorPool] = set()

    @property
    def unpaused_s(self) -> float:
        """For how many seconds the work goes on, since it last paused; 0 while it waits for something that does not
        answer: a judge, an endpoint, all actors of a pool."""
        return 0.0 if self._num_paused else time.monotonic() - self._went_on

    def scale(self, kind: str, size: int, added: Mapping[str, Any]) -> None:
        """Have `size` actors in the pool of a kind, `added` among them; who is too many leaves when it is free."""
        (pool,) = (pool for pool in self._both if pool.kind == kind)
        pool.grow(added)
        pool.shrink(size)

    def staying(self) -> dict[str, list[str]]:
        """The names of each kind's actors that are to stay."""
        return {pool.kind: pool.staying for pool in self._both}

    def leaving(self) -> list[str]:
        """The names of the actors of both that leave as soon as they are free."""
        return [*self._samplers.leaving, *self._graders.leaving]

    def look_for_outages(self) -> None:
        """Pause where nobody of a pool has been up for a while, and go on where somebody is. To be called again and
        again."""
        for pool in self._both:
            if pool.out_s() > SILENT_S and pool not in self._out:
                self._out.add(pool)
                self._pause(f"no {pool.kind} is up; the work waits until one is")
            elif not pool.out_s() and pool in self._out:
                self._out.remove(pool)
                self._go_on()

    @property
    def _both(self) -> tuple[ActorPool, ActorPool]:
        return self._samplers, self._graders

    def use(self) -> dict[str, dict[str, float]]:
        """How each pool has fared since the last call: the fields of `PoolUse`."""
        return {f"{pool.kind}s": asdict(pool.use()) for pool in self._both}

    def members(self) -> dict[str, Any]:
        """The actors of both pools by name."""
        return {member.name: member.actor for pool in self._both for member in pool.members}

    def assignments(self) -> list[Assignment]:
        """Who of both is at work on what."""
        return [*self._samplers.assignments(), *self._graders.assignments()]

    def away(self) -> dict[str, float]:
        """Who of both does not answer, and for how many seconds."""
        return self._samplers.away() | self._graders.away()

    def stage(self, generation: Generation) -> None:
        """Have the samplers fetch weights beside what they are at: what they start next is likely to be of these."""
        for member in self._samplers.up():
            # Nobody waits for it: one that has not fetched them does so when it is asked for a portion.
            member.actor.stage.options(concurrency_group="weights").remote(generation)

    async def end_turn(self) -> list[str]:
        """Have the samplers sleep, who share GPUs with the learner. Returns and raises as `ActorPool.sleep` does."""
        return await self._samplers.sleep()

    def take_works(self) -> list[Work]:
        """What the actors of both did since the last call."""
        return [*self._samplers.take_works(), *self._graders.take_works()]

    async def score(
        self, generation: Generation, key: PortionKey, make: Callable[[], Portion], due: float
    ) -> tuple[ray.ObjectRef[Any], PortionSummary]:
        """Sample and grade a portion with the weights of one generation; it is made when a sampler is free, for
        thousands may wait. `due` is the round that it is wanted for: what is due first is served first.

        Returns the reference of the scored portion, which travels to the learner past this process, and its summary.
        Raises PortionFailedError, and VersionLostError where the weights are nowhere.
        """
        made: list[Portion] = []

        def generate(sampler: Any) -> Any:
            made.append(make())
            return sampler.generate.options(num_returns=2).remote(generation, made[0])

        completions, _ = await _call(self._samplers, key, due, generate)
        graded = await self._graded(made[0], due, completions)
        return graded[0], graded[1]

    async def _graded(self, portion: Portion, due: float, completions: Any) -> tuple[Any, Any]:
        """Grade, once what a reward depends on answers, however long that takes: it is no failure of the portion."""
        pause_s, is_waiting = _FIRST_PAUSE_S, False
        grade = partial(_grade, portion, completions)
        try:
            while True:
                try:
                    return await _call(self._graders, portion.key, due, grade)
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
            self._went_on = time.monotonic()
            self._on_pause(None)


def _grade(portion: Portion, completions: Any, grader: Any) -> Any:
    return grader.grade.options(num_returns=2).remote(portion, completions)


async def _call(pool: ActorPool, key: PortionKey, due: float, ask: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Ask a free actor; returns the reference of its first return and the value of its second."""
    member = await pool.take(key, due)
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
