"""The sampler pool and the grader pool, as the coordinator drives them: one try of one portion at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from actors.messages import Portion, PortionSummary

# A killed actor takes about a second to come back; asking it sooner only fails again.
_RESTART_PAUSE_S = 1.0


class PortionFailedError(Exception):
    """A try of a portion failed; says why."""


class Pools:
    """Free samplers and graders. Who waits first is served first."""

    def __init__(
        self, samplers: Sequence[Any], graders: Sequence[Any], sampling_timeout_s: float, grading_timeout_s: float
    ) -> None:
        """Take over actor handles; a call that takes longer than its timeout kills (and so restarts) its actor."""
        self._samplers = _queue_of(samplers)
        self._graders = _queue_of(graders)
        self._sampling_timeout_s, self._grading_timeout_s = sampling_timeout_s, grading_timeout_s

    async def score(self, version: int, portion: Portion) -> tuple[ray.ObjectRef[Any], PortionSummary]:
        """Sample and grade a portion with one policy version.

        Returns the reference of the scored portion, which travels to the learner past this process, and its summary.
        Raises PortionFailedError.
        """
        completions = await _call(self._samplers, "sampler", self._sampling_timeout_s, _generate, version, portion)
        graded = await _call(self._graders, "grader", self._grading_timeout_s, _grade, portion, completions[0])
        return graded[0], graded[1]


def _queue_of(actors: Sequence[Any]) -> asyncio.Queue[Any]:
    queue: asyncio.Queue[Any] = asyncio.Queue()
    for actor in actors:
        queue.put_nowait(actor)
    return queue


def _generate(sampler: Any, version: int, portion: Portion) -> Any:
    return sampler.generate.options(num_returns=2).remote(version, portion)


def _grade(grader: Any, portion: Portion, completions: Any) -> Any:
    return grader.grade.options(num_returns=2).remote(portion, completions)


async def _call(free: asyncio.Queue[Any], kind: str, timeout_s: float, method: Any, *arguments: Any) -> tuple[Any, Any]:
    """Call a free actor; returns the reference of its first return and the value of its second."""
    actor = await free.get()
    pause_s = 0.0
    try:
        payload, small = method(actor, *arguments)
        return payload, await asyncio.wait_for(small, timeout_s)
    except (TimeoutError, GetTimeoutError) as error:
        ray.kill(actor, no_restart=False)
        pause_s = _RESTART_PAUSE_S
        raise PortionFailedError(f"a {kind} did not answer within {timeout_s:.0f} s and was restarted") from error
    except RayError as error:
        pause_s = _RESTART_PAUSE_S if isinstance(error, RayActorError) else 0.0
        reason = str(error).strip().splitlines()
        raise PortionFailedError(f"a {kind} failed: {reason[-1] if reason else type(error).__name__}") from error
    finally:
        asyncio.get_running_loop().call_later(pause_s, free.put_nowait, actor)
