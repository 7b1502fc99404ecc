"""Accuracy of a version: every held-out or validation problem once, through the samplers and graders of training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from actors.coordination.pools import Pools, PortionFailedError
from actors.messages import Generation, Portion, PortionSummary
from actors.plan import RunPlan
from actors.run_log import VALIDATION
from actors.spec import Phase
from rewards import Outcome
from rollout.request import SamplingParams

# Evaluations that are no end of a stage that a result is told of.
_ONE_SCHEDULE = ("round", VALIDATION, Phase.UNTRAINED)


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
        self._heldout: dict[str, list[Portion]] = {}
        count = 0
        for params in schedules:
            self._heldout[params.schedule_name] = plan.evaluation_portions(params, count)
            count += len(self._heldout[params.schedule_name])
        first = schedules[0]
        self._validation = {first.schedule_name: plan.evaluation_portions(first, count, plan.validation)}
        self._pools, self._max_attempts, self._on_failure = pools, max_attempts, on_failure

    async def score(self, generation: Generation, label: str, due: float) -> dict[str, Any]:
        """What the `evaluation` event of a label says of the completions: of those at the first schedule, and, at the
        end of a stage, of those at each under `schedules`. They are sampled before what is due later, as of rounds.

        Raises:
            VersionLostError: the weights are nowhere.
            RuntimeError: no try of a portion came back: an accuracy over fewer problems would be another number.
        """
        portions = self._validation if label == VALIDATION else self._heldout
        names = list(portions)[:1] if label in _ONE_SCHEDULE else list(portions)
        tries = [
            asyncio.create_task(self._with_retries(generation, portion, due))
            for name in names
            for portion in portions[name]
        ]
        try:
            summaries = iter(await asyncio.gather(*tries))
        finally:
            for attempt in tries:
                attempt.cancel()
        found = {name: _counts([next(summaries) for _ in portions[name]]) for name in names}
        return {"schedule": names[0], **found[names[0]], "schedules": found}

    async def _with_retries(self, generation: Generation, portion: Portion, due: float) -> PortionSummary:
        """The summary of a portion. What no try can grade counts as wrong: at temperature 0 a text comes back the same,
        and so does what its grader fails on."""
        summary = None
        for attempt in range(1, self._max_attempts + 1):
            try:
                _, summary = await self._pools.score(generation, portion.key, lambda: portion, due)
            except PortionFailedError as error:
                self._on_failure(str(error), attempt)
                last = error
            else:
                if not summary.failures:
                    return summary
                self._on_failure(summary.failures[0], attempt)
        if summary is None:
            raise RuntimeError(f"the evaluation failed {self._max_attempts} times: {last}") from last
        for what in summary.failures[1:]:
            self._on_failure(what, self._max_attempts)
        return summary


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
