"""The sampler pool and the grader pool, as the coordinator drives them: one try of one portion at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.messages import Generation, Portion, PortionSummary
from rewards import RewardUnavailableError

_RESTART_POLL_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class PortionFailedError(Exception):
    """A try of a portion failed; says why."""


class Pools:
    """Free samplers and graders. Who waits first is served first."""

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
        self._samplers = _queue_of(samplers)
        self._graders = _queue_of(graders)
        self._sampling_timeout_s, self._grading_timeout_s = sampling_timeout_s, grading_timeout_s
        self._on_pause = on_pause
        self._num_paused = 0

    @property
    def is_paused(self) -> bool:
        """Whether grading waits for something that does not answer: a judge, an endpoint."""
        return self._num_paused > 0

    async def score(self, generation: Generation, portion: Portion) -> tuple[ray.ObjectRef[Any], PortionSummary]:
        """Sample and grade a portion with the weights of one generation.

        Returns the reference of the scored portion, which travels to the learner past this process, and its summary.
        Raises PortionFailedError.
        """
        completions = await _call(self._samplers, "sampler", self._sampling_timeout_s, _generate, generation, portion)
        graded = await self._graded(portion, completions[0])
        return graded[0], graded[1]

    async def _graded(self, portion: Portion, completions: Any) -> tuple[Any, Any]:
        """Grade, once what a reward depends on answers, however long that takes: it is no failure of the portion."""
        pause_s, is_waiting = _FIRST_PAUSE_S, False
        try:
            while True:
                try:
                    return await _call(self._graders, "grader", self._grading_timeout_s, _grade, portion, completions)
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


def _queue_of(actors: Sequence[Any]) -> asyncio.Queue[Any]:
    queue: asyncio.Queue[Any] = asyncio.Queue()
    for actor in actors:
        queue.put_nowait(actor)
    return queue


def _generate(sampler: Any, generation: Generation, portion: Portion) -> Any:
    return sampler.generate.options(num_returns=2).remote(generation, portion)


def _grade(grader: Any, portion: Portion, completions: Any) -> Any:
    return grader.grade.options(num_returns=2).remote(portion, completions)


async def _call(free: asyncio.Queue[Any], kind: str, timeout_s: float, method: Any, *arguments: Any) -> tuple[Any, Any]:
    """Call a free actor; returns the reference of its first return and the value of its second."""
    actor = await free.get()
    payload, small = method(actor, *arguments)
    is_healthy = False
    try:
        value = await asyncio.wait_for(small, timeout_s)
        is_healthy = True
    except TimeoutError as error:
        ray.kill(actor, no_restart=False)
        raise PortionFailedError(f"a {kind} did not answer within {timeout_s:.0f} s and was restarted") from error
    except RayTaskError as error:
        if isinstance(error.cause, RewardUnavailableError):
            is_healthy = True
            raise error.cause from None
        raise _failed(kind, error) from error
    except RayError as error:
        raise _failed(kind, error) from error
    finally:
        if is_healthy:
            free.put_nowait(actor)
        else:
            _keep(asyncio.create_task(_give_back(free, actor)))
    return payload, value


def _failed(kind: str, error: RayError) -> PortionFailedError:
    lines = str(error).strip().splitlines()
    return PortionFailedError(f"a {kind} failed: {lines[-1] if lines else type(error).__name__}")


async def _give_back(free: asyncio.Queue[Any], actor: Any) -> None:
    """Put an actor back once it answers: after a restart, or after the call that nobody waits for any more.

    A call to an actor that is restarting fails at once; were it free, it would use up the tries of every portion.
    """
    while True:
        try:
            await actor.ready.remote()
        except RayError:
            await asyncio.sleep(_RESTART_POLL_S)
        else:
            return free.put_nowait(actor)


_RETURNING: set[asyncio.Task[None]] = set()


def _keep(task: asyncio.Task[None]) -> None:
    """Hold a task until it is done: the event loop itself does not."""
    _RETURNING.add(task)
    task.add_done_callback(_RETURNING.discard)
