"""Evaluation of a policy version on held-out or validation problems, with the pools of training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from actors.coordination.pools import Pools, VersionLostError, WorkUnitFailedError
from actors.messages import WeightsId, WorkUnit, WorkUnitSummary
from actors.plan import RunPlan
from actors.run_log import VALIDATION
from actors.spec import Phase, RunSpec
from learner.model.checkpoint_files import load_config
from learner.model.config import TransformerConfig
from rewards import Outcome, Problem
from rollout.request import SamplingParams

# Labels that are evaluated at the first schedule only: none is the end of a stage whose result is reported.
_ONE_SCHEDULE = ("round", VALIDATION, Phase.UNTRAINED)
# Due before all rounds: an evaluation that the learner waits for.
_AT_ONCE = -1.0
# Problems that a message lists; the log's evaluations list all.
_MOST_NAMED = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class _EvaluationProblems:
    """Problems of an evaluation at one schedule."""

    work_units: list[WorkUnit]
    """Work units of the problems that are sampled."""
    without_room: list[Problem]
    """Problems whose prompts leave no room for a completion; they count as wrong."""


class VersionEvaluator:
    """Evaluates policy versions on the problems of a plan."""

    def __init__(self, spec: RunSpec, plan: RunPlan, pools: Pools, on_failure: Callable[[str, int], None]) -> None:
        """Prepare evaluations at each of the recipe's schedules; policies are compared at the first.

        `on_failure` receives what failed, and the number of the attempt.

        Raises ValueError if no prompt leaves room for a completion.
        """
        schedules, policy = spec.evaluated_params, load_config(spec.initial_checkpoint)
        self._heldout: dict[str, _EvaluationProblems] = {}
        count = 0
        for params in schedules:
            self._heldout[params.schedule_name] = _evaluation_problems(plan, params, policy, count, plan.heldout)
            count += len(self._heldout[params.schedule_name].work_units)
        first = schedules[0]
        self._validation = {first.schedule_name: _evaluation_problems(plan, first, policy, count, plan.validation)}
        self._pools, self._max_attempts, self._on_failure = pools, spec.rollout.max_attempts, on_failure
        self._gen_length, self._max_sequence_length = first.gen_length, policy.max_sequence_length
        self._background: tuple[tuple[WeightsId, str], asyncio.Task[dict[str, Any]]] | None = None
        """Version and label of the evaluation that runs in the background of a round, and its task."""

    @property
    def room_warning(self) -> str:
        """A sentence about problems that count as wrong, because their prompts leave no room; empty if none do."""
        of_each = (next(iter(problems.values())) for problems in (self._heldout, self._validation))
        names = [problem.problem_id for problems in of_each for problem in problems.without_room]
        if not names:
            return ""
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return (
            f"{len(names)} evaluation problems count as wrong, as their prompts leave no room for "
            f"{self._gen_length} slots in the policy's {self._max_sequence_length} tokens: "
            f"{', '.join(names[:_MOST_NAMED])}{more}"
        )

    def start_background(self, weights_id: WeightsId, label: str, due: float) -> None:
        """Evaluate a version in the background, unless an evaluation runs there. The arguments are those of `score`."""
        if self._background is None:
            self._background = (weights_id, label), asyncio.create_task(self.score(weights_id, label, due))

    def cancel_background(self) -> None:
        """End the evaluation in the background, if any."""
        if self._background is not None:
            # Marks its exception as retrieved: it was raised already, or the evaluation is requested again.
            self._background[1].add_done_callback(lambda task: task.cancelled() or task.exception())
            self._background[1].cancel()
            self._background = None

    async def score_now(self, weights_id: WeightsId, label: str) -> dict[str, Any]:
        """Evaluate a version before all rounds, or wait for the evaluation of it that runs in the background."""
        if self._background is not None and self._background[0] == (weights_id, label):
            # If the store had lost the version, the learner has published it again for the round: evaluate below.
            with suppress(VersionLostError):
                return await self._background[1]
        return await self.score(weights_id, label, _AT_ONCE)

    async def score(self, weights_id: WeightsId, label: str, due: float) -> dict[str, Any]:
        """Evaluate a version. Returns fields of the `evaluation` event of a label.

        They are the numbers of the first schedule, and under `schedules` those of each: of all at the end of a stage,
        else of the first. Work units are sampled before those with a later `due`, which counts rounds.

        Raises:
            VersionLostError: the weight store has lost the version.
            RuntimeError: all attempts at a work unit failed; an accuracy over fewer problems is not comparable.
        """
        problems = self._validation if label == VALIDATION else self._heldout
        names = list(problems)[:1] if label in _ONE_SCHEDULE else list(problems)
        tries = [
            asyncio.create_task(self._with_retries(weights_id, work_unit, due))
            for name in names
            for work_unit in problems[name].work_units
        ]
        try:
            summaries = iter(await asyncio.gather(*tries))
        finally:
            for attempt in tries:
                attempt.cancel()
        found = {name: _counts([next(summaries) for _ in problems[name].work_units], problems[name]) for name in names}
        return {"schedule": names[0], **found[names[0]], "schedules": found}

    async def _with_retries(self, weights_id: WeightsId, work_unit: WorkUnit, due: float) -> WorkUnitSummary:
        """Score a work unit, with retries. Completions that no attempt can grade count as wrong: at temperature 0 each
        attempt gives the same text, so its grader fails again."""
        summary = None
        for attempt in range(1, self._max_attempts + 1):
            try:
                _, summary = await self._pools.score(weights_id, work_unit.key, lambda: work_unit, due)
            except WorkUnitFailedError as error:
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


def _evaluation_problems(
    plan: RunPlan, params: SamplingParams, policy: TransformerConfig, first_index: int, problems: Sequence[Problem]
) -> _EvaluationProblems:
    return _EvaluationProblems(
        work_units=plan.evaluation_work_units(params, policy, first_index, problems),
        without_room=plan.without_room(params, policy, problems),
    )


def _counts(summaries: Sequence[WorkUnitSummary], problems: _EvaluationProblems) -> dict[str, Any]:
    """Return the numbers of an evaluation. Problems without room count as wrong, and are listed."""
    names = [problem.problem_id for problem in problems.without_room]
    grades = [grade for summary in summaries for grade in summary.grades]
    # The step map counts only steps that wrote something. With guidance a step takes two forwards.
    is_guided = bool(problems.work_units[0].requests[0].params.cfg_scale)
    steps = [count / (2 if is_guided else 1) for summary in summaries for count in summary.num_forwards]
    return {
        "num_correct": sum(grade.correct for grade in grades),
        "num_problems": len(grades) + len(names),
        "num_ungraded": sum(grade.outcome is not Outcome.GRADED for grade in grades),
        "items_right": sum(grade.score[0] for grade in grades),
        "num_items": sum(grade.score[1] for grade in grades) + len(names),
        "mean_steps": round(sum(steps) / len(steps), 2),
        **({"without_room": names} if names else {}),
    }
