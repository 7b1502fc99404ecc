"""Sampler and grader pools of the coordinator: each call is one attempt at one work unit."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Self

import ray
from ray.exceptions import RayError, RayTaskError

from actors import NAMESPACE, actor_name
from actors.coordination.pool import ActorPool
from actors.coordination.reporting.status import SILENT_S, Assignment
from actors.coordination.reporting.timeline import WorkSpan
from actors.messages import WeightsId, WorkUnit, WorkUnitKey, WorkUnitSummary
from actors.spec import RunSpec
from actors.weights.store import VersionMissingError
from rewards import RewardUnavailableError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class WorkUnitFailedError(Exception):
    """An attempt at a work unit failed; the message has the cause."""


class VersionLostError(Exception):
    """The weight store does not have the version that a work unit is sampled from; the message names it."""


class Pools:
    """The pool of samplers and the pool of graders."""

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
        """Take over actor handles, by name. An actor whose call exceeds its timeout is killed and so restarted.

        `on_pause` receives the reason when work pauses, and None when it resumes. `on_left` receives the name of an
        actor that left its pool.
        """
        self._samplers = ActorPool("sampler", samplers, sampling_timeout_s, on_left)
        self._graders = ActorPool("grader", graders, grading_timeout_s, on_left)
        self._on_pause = on_pause
        self._num_paused = 0
        self._resumed_at = -math.inf
        self._outages: set[ActorPool] = set()

    @classmethod
    def for_run(
        cls,
        spec: RunSpec,
        begun_with: Mapping[str, Mapping[str, Any]],
        names: Mapping[str, Collection[str]],
        *,
        on_pause: Callable[[str | None], None],
        on_left: Callable[[str], None],
    ) -> Self:
        """Take over a run's actors by kind: those that it began with, or after a resize those of `names`."""
        samplers, graders = (
            pool_members(spec.name, begun_with[kind], names.get(kind)) for kind in ("sampler", "grader")
        )
        return cls(
            samplers,
            graders,
            spec.sampling_timeout_s,
            spec.grading_timeout_s,
            on_pause=on_pause,
            on_left=on_left,
        )

    @property
    def running_s(self) -> float:
        """Seconds since the last pause ended; 0 during a pause, while a judge, an endpoint or all actors of a pool do
        not answer."""
        return 0.0 if self._num_paused else time.monotonic() - self._resumed_at

    def scale(self, kind: str, size: int, added: Mapping[str, Any]) -> None:
        """Resize the pool of a kind to `size` actors. `added` are new ones; surplus ones leave when they are free."""
        (pool,) = (pool for pool in self._both if pool.kind == kind)
        pool.grow(added)
        pool.shrink(size)

    def staying(self) -> dict[str, list[str]]:
        """Return the names of the actors that are not about to leave, by kind."""
        return {pool.kind: pool.staying for pool in self._both}

    def leaving(self) -> list[str]:
        """Return the names of the actors of both pools that leave as soon as they are free."""
        return [*self._samplers.leaving, *self._graders.leaving]

    def check_outages(self) -> None:
        """Pause if no actor of a pool has been up for a while, and resume once one is. To be called periodically."""
        for pool in self._both:
            if pool.outage_s() > SILENT_S and pool not in self._outages:
                self._outages.add(pool)
                self._pause(f"no {pool.kind} is up; the work waits until one is")
            elif not pool.outage_s() and pool in self._outages:
                self._outages.remove(pool)
                self._resume()

    def longest_outage(self) -> tuple[str, float]:
        """Return the kind of the pool that has had no actor for longest, and for how many seconds."""
        pool = max(self._both, key=ActorPool.outage_s)
        return pool.kind, pool.outage_s()

    @property
    def _both(self) -> tuple[ActorPool, ActorPool]:
        return self._samplers, self._graders

    def use(self) -> dict[str, dict[str, float]]:
        """Return the utilization of each pool since the last call."""
        return {f"{pool.kind}s": pool.use() for pool in self._both}

    def members(self) -> dict[str, Any]:
        """Return the actors of both pools by name."""
        return {member.name: member.actor for pool in self._both for member in pool.members}

    def assignments(self) -> list[Assignment]:
        """Return the current assignment of each busy actor of both pools."""
        return [*self._samplers.assignments(), *self._graders.assignments()]

    def unreachable(self) -> dict[str, float]:
        """Return the unreachable actors of both pools, and for how many seconds they have been so."""
        return self._samplers.unreachable() | self._graders.unreachable()

    def prefetch(self, weights_id: WeightsId) -> None:
        """Make the samplers prefetch new weights in the background: their next work units probably need them."""
        for member in self._samplers.up():
            # Not awaited: a sampler that has not fetched the weights does so when it gets a work unit.
            member.actor.prefetch.options(concurrency_group="weights").remote(weights_id)

    async def end_turn(self) -> list[str]:
        """Make samplers that share GPUs with the learner release them.

        Returns and raises as `ActorPool.release_device_memory` does.
        """
        return await self._samplers.release_device_memory()

    def take_spans(self) -> list[WorkSpan]:
        """Return the time spans of both pools recorded since the last call."""
        return [*self._samplers.take_spans(), *self._graders.take_spans()]

    async def score(
        self, weights_id: WeightsId, key: WorkUnitKey, make: Callable[[], WorkUnit], due: float
    ) -> tuple[ray.ObjectRef[Any], WorkUnitSummary]:
        """Sample and grade a work unit with the weights of one generation.

        `make` builds it once a sampler is free, because thousands may wait. `due` is the round that needs it: the
        earliest is served first.

        Returns a reference to the scored work unit, whose data go to the learner past this process, and its summary.
        Raises WorkUnitFailedError, and VersionLostError if the weight store has lost the weights.
        """
        made: list[WorkUnit] = []

        def generate(sampler: Any) -> Any:
            made.append(make())
            return sampler.generate.options(num_returns=2).remote(weights_id, made[0])

        completions, _ = await _call(self._samplers, key, due, generate)
        graded = await self._grade_with_pause(made[0], due, completions)
        return graded[0], graded[1]

    async def _grade_with_pause(self, work_unit: WorkUnit, due: float, completions: Any) -> tuple[Any, Any]:
        """Grade a work unit. Waits without limit for services that a reward depends on: their outage does not count as
        a failure of the work unit."""
        pause_s, is_waiting = _FIRST_PAUSE_S, False
        grade = partial(_grade, work_unit, completions)
        try:
            while True:
                try:
                    return await _call(self._graders, work_unit.key, due, grade)
                except RewardUnavailableError as error:
                    if not is_waiting:
                        is_waiting = True
                        self._pause(str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            if is_waiting:
                self._resume()

    def _pause(self, why: str) -> None:
        self._num_paused += 1
        if self._num_paused == 1:
            self._on_pause(why)

    def _resume(self) -> None:
        self._num_paused -= 1
        if not self._num_paused:
            self._resumed_at = time.monotonic()
            self._on_pause(None)


def _grade(work_unit: WorkUnit, completions: Any, grader: Any) -> Any:
    return grader.grade.options(num_returns=2).remote(work_unit, completions)


async def _call(pool: ActorPool, key: WorkUnitKey, due: float, ask: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Call a free actor. Returns a reference to its first result, and the value of its second."""
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
        # Our own timeout: one that the actor raised is a RayTaskError too.
        ray.kill(member.actor, no_restart=False)
        raise WorkUnitFailedError(
            f"a {pool.kind} did not answer within {pool.timeout_s:.0f} s and was restarted"
        ) from error
    finally:
        pool.give_back(member, is_healthy=is_healthy)
    return payload, value


def _failed(kind: str, error: RayError) -> WorkUnitFailedError:
    lines = str(error).strip().splitlines()
    return WorkUnitFailedError(f"a {kind} failed: {lines[-1] if lines else type(error).__name__}")


def pool_members(run: str, begun_with: Mapping[str, Any], names: Collection[str] | None) -> dict[str, Any]:
    """Return the actors of a pool by name: those that the run began with, or after a resize those of `names` that
    exist."""
    if names is None:
        return dict(begun_with)
    found = {}
    for name in names:
        # An actor that cannot be found has ended for good.
        with suppress(ValueError):
            found[name] = begun_with.get(name) or ray.get_actor(actor_name(run, name), namespace=NAMESPACE)
    return found
