"""Accuracy of a version: every held-out or validation problem once, through the samplers and graders of training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from actors.coordination.pools import Pools, PortionFailedError
from actors.messages import Generation, Portion, PortionSummary
from actors.plan import RunPlan
from actors.run_log import VALIDATION
from actors.spec import Phase
from learner.model.config import TransformerConfig
from rewards import Outcome, Problem
from rollout.request import SamplingParams

# Evaluations that are no end of a stage that a result is told of.
_ONE_SCHEDULE = ("round", VALIDATION, Phase.UNTRAINED)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What an evaluation asks at one schedule."""

    portions: list[Portion]
    """The problems that are answered."""
    without_room: list[Problem]
    """Those that cannot be, and count as wrong."""


class VersionEvaluator:
    """Evaluates versions on the problems of a plan."""

    def __init__(
        self,
        plan: RunPlan,
        schedules: Sequence[SamplingParams],
        pools: Pools,
        max_attempts: int,
        on_failure: Callable[..., None],
        *,
        policy: TransformerConfig,
    ) -> None:
        """At `schedules`, of which the first counts, of a `policy` of this shape. `on_failure` is told what failed, and
        at which attempt.

        Raises ValueError where no prompt leaves room for a completion.
        """
        self._heldout: dict[str, _Asked] = {}
        count = 0
        for params in schedules:
            self._heldout[params.schedule_name] = _asked(plan, params, policy, count, plan.heldout)
            count += len(self._heldout[params.schedule_name].portions)
        first = schedules[0]
        self._validation = {first.schedule_name: _asked(plan, first, policy, count, plan.validation)}
        self._pools, self._max_attempts, self._on_failure = pools, max_attempts, on_failure

    @property
    def without_room(self) -> list[Problem]:
        """The problems that no version is asked at the first schedule, as their prompts leave no room."""
        of_each = (next(iter(asked.values())) for asked in (self._heldout, self._validation))
        return [problem for asked in of_each for problem in asked.without_room]

    async def score(self, generation: Generation, label: str, due: float) -> dict[str, Any]:
        """What the `evaluation` event of a label says of the completions: of those at the first schedule, and, at the
        end of a stage, of those at each under `schedules`. They are sampled before what is due later, as of rounds.

        Raises:
            VersionLostError: the weights are nowhere.
            RuntimeError: no try of a portion came back: an accuracy over fewer problems would be another number.
        """
        asked = self._validation if label == VALIDATION else self._heldout
        names = list(asked)[:1] if label in _ONE_SCHEDULE else list(asked)
        tries = [
            asyncio.create_task(self._with_retries(generation, portion, due))
            for name in names
            for portion in asked[name].portions
        ]
        try:
            summaries = iter(await asyncio.gather(*tries))
        finally:
            for attempt in tries:
                attempt.cancel()
        found = {
            name: _counts([next(summaries) for _ in asked[name].portions], asked[name].without_room) for name in names
        }
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


def _asked(
    plan: RunPlan, params: SamplingParams, policy: TransformerConfig, first_index: int, problems: Sequence[Problem]
) -> _Asked:
    return _Asked(
        portions=plan.evaluation_portions(params, policy, first_index, problems),
        without_room=plan.without_room(params, policy, problems),
    )


def _counts(summaries: Sequence[PortionSummary], without_room: Sequence[Problem]) -> dict[str, Any]:
    """Numbers of an evaluation. Problems that could not be asked count as wrong, and are named."""
    names = [problem.problem_id for problem in without_room]
    grades = [grade for summary in summaries for grade in summary.grades]
    steps = [max(step_map) + 1 for summary in summaries for step_map in summary.step_maps]
    return {
        "num_correct": sum(grade.correct for grade in grades),
        "num_problems": len(grades) + len(names),
        "num_ungraded": sum(grade.outcome is not Outcome.GRADED for grade in grades),
        "items_right": sum(grade.score[0] for grade in grades),
        "num_items": sum(grade.score[1] for grade in grades) + len(names),
        "mean_steps": round(sum(steps) / len(steps), 2),
        **({"without_room": names} if names else {}),
    }
