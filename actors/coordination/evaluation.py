"""Held-out accuracy of a version: every held-out problem once at each schedule, through the samplers and graders of
training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from actors.coordination.pools import Pools, PortionFailedError
from actors.messages import Generation, Portion, PortionSummary
from actors.plan import RunPlan
from actors.run_log import Event
from actors.spec import Phase
from rewards import Outcome
from rollout.request import SamplingParams


class VersionEvaluator:
    """Evaluates versions on the problems of a plan."""

    def __init__(
        self,
        plan: RunPlan,
        schedules: Sequence[SamplingParams],
        pools: Pools,
        max_attempts: int,
        on_failure: Callable[..., None],
    ) -> None:
        """At `schedules`, of which the first counts. `on_failure` is told what failed, and at which attempt."""
        self._portions: dict[str, list[Portion]] = {}
        for params in schedules:
            self._portions[params.schedule_name] = plan.evaluation_portions(
                params, sum(map(len, self._portions.values()))
            )
        self._pools, self._max_attempts, self._on_failure = pools, max_attempts, on_failure

    async def score(self, generation: Generation, *, at_all: bool) -> dict[str, Any]:
        """What the `evaluation` event says of the completions: of those at the first schedule, and, with `at_all`, of
        those at each under `schedules`.

        Raises:
            VersionLostError: the weights are nowhere.
            RuntimeError: a portion cannot be scored: an accuracy over fewer problems would be another number.
        """
        names = list(self._portions) if at_all else list(self._portions)[:1]
        tries = [
            asyncio.create_task(self._with_retries(generation, portion))
            for name in names
            for portion in self._portions[name]
        ]
        try:
            summaries = iter(await asyncio.gather(*tries))
        finally:
            for attempt in tries:
                attempt.cancel()
        found = {name: _counts([next(summaries) for _ in self._portions[name]]) for name in names}
        return {"schedule": names[0], **found[names[0]], "schedules": found}

    async def _with_retries(self, generation: Generation, portion: Portion) -> PortionSummary:
        for attempt in range(1, self._max_attempts + 1):
            try:
                _, summary = await self._pools.score(generation, portion)
                if summary.failures:
                    raise PortionFailedError(summary.failures[0])
            except PortionFailedError as error:
                self._on_failure(str(error), attempt)
                last = error
            else:
                return summary
        raise RuntimeError(f"the evaluation failed {self._max_attempts} times: {last}") from last


def _counts(summaries: Sequence[PortionSummary]) -> dict[str, float]:
    grades = [grade for summary in summaries for grade in summary.grades]
    steps = [max(step_map) + 1 for summary in summaries for step_map in summary.step_maps]
    return {
        "num_correct": sum(grade.correct for grade in grades),
        "num_problems": len(grades),
        "num_ungraded": sum(grade.outcome is not Outcome.GRADED for grade in grades),
        "items_right": sum(grade.score[0] for grade in grades),
        "num_items": sum(grade.score[1] for grade in grades),
        "mean_steps": round(sum(steps) / len(steps), 2),
    }


def best_version(events: list[Event]) -> int | None:
    """The version of the rounds with the best held-out accuracy; None where none was evaluated.

    The oldest of several: an accuracy that stays where it is, at 0 too, writes no checkpoint each time. Of those of one
    version, as after a restart, the later counts.
    """
    found: dict[int, float] = {}
    for event in events:
        if event["event"] == "round":
            # A resumed run does the rounds after its checkpoint again: what was later is gone.
            found = {version: share for version, share in found.items() if version < event["policy_version"]}
        elif event["event"] == "evaluation" and event["label"] in ("round", Phase.RL):
            found[event["policy_version"]] = event["num_correct"] / event["num_problems"]
    return max(found, key=lambda version: (found[version], -version), default=None)
