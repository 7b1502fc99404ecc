"""The canary of a run: its first validation or held-out problems, asked and graded as in its evaluations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from actors.grader import GraderWorker
from actors.messages import WorkUnit
from actors.plan import RunPlan
from deploy.recipe.recipe import CanarySection, Recipe, Stages
from deploy.runs.run_directory import make_spec
from deploy.service.engine.loaded_version import CanaryError, NoLongerWantedError, StillWanted
from learner.model.checkpoint_files import load_config
from learner.model.tokenizer import ChatTokenizer
from rewards import Outcome, RewardConfig
from rollout.config import EngineConfig
from rollout.request import Completion
from rollout.sampler import Sampler
from rollout.score import Score

# Few, so that a step is short and requests go on in between.
_MAX_ROWS = 8
_ASK_EVERY_S = 1.0


class HeldoutCanary:
    """Asks versions those problems. One thread uses it."""

    def __init__(self, recipe: Recipe, config: CanarySection, checkpoint: Path) -> None:
        """Make the problems at the first use.

        Args:
            recipe: of the run: its task, its sampling, its grader.
            config: how many problems, and how much worse is too much.
            checkpoint: one of the run's, for the tokenizer.
        """
        self._recipe, self._config, self._checkpoint = recipe, config, checkpoint
        # Compiled graphs belong to the engine's thread.
        self._engine: EngineConfig = recipe.rollout.engine.model_copy(update={"compile": False})
        self._work_units: Sequence[WorkUnit] = ()
        self._grader: GraderWorker | None = None

    def score(self, sampler: Sampler, still_wanted: StillWanted) -> Score:
        """As `Canary.score`. CanaryError: it took too long, the grader failed, or there are no such problems."""
        try:
            grader = self._made()
            deadline = time.monotonic() + self._config.timeout_s
            grades = [
                grade
                for work_unit, completions in self._completions(sampler, deadline, still_wanted)
                for grade in grader.grade(work_unit, completions)[1].grades
            ]
        except (OSError, ValueError, FloatingPointError) as error:
            raise CanaryError(str(error)) from error
        for grade in grades:
            if grade.outcome is Outcome.ERROR:
                raise CanaryError(f"a grade is missing: {grade.detail}")
        return Score(num_correct=sum(grade.correct for grade in grades), num_problems=len(grades))

    def objection(self, score: Score, serving: Score) -> str | None:
        """As `Canary.objection`."""
        if score.accuracy >= serving.accuracy - self._config.max_drop:
            return None
        return (
            f"it solves {score.num_correct} of the {score.num_problems} canary problems, and the version that serves "
            f"{serving.num_correct}; service.canary.max_drop is {self._config.max_drop:g}"
        )

    def _made(self) -> GraderWorker:
        """The grader, and the problems beside it. Raises ValueError, OSError."""
        if self._grader is None:
            plan = RunPlan(make_spec(self._recipe, Stages.ALL), ChatTokenizer(self._checkpoint))
            params, policy = self._recipe.evaluated_params[0], load_config(self._checkpoint)
            problems = plan.selection_problems[: self._config.num_problems]
            self._work_units = plan.evaluation_work_units(params, policy, problems=problems)
            # An evaluation asks no term of the reward.
            self._grader = GraderWorker(self._recipe.task, RewardConfig(), self._checkpoint)
        return self._grader

    def _completions(
        self, sampler: Sampler, deadline: float, still_wanted: StillWanted
    ) -> list[tuple[WorkUnit, list[Completion]]]:
        """What the version answers, a step at a time; between two, requests have as much time as a step took."""
        batch = Sampler(sampler.model, sampler.policy_version, self._engine).open(max_rows=_MAX_ROWS)
        requests = [request for work_unit in self._work_units for request in work_unit.requests]
        for request in requests:
            batch.submit(request)
        done: dict[int, Completion] = {}
        asked_at = time.monotonic()
        while len(done) < len(requests):
            began = time.monotonic()
            if began > asked_at + _ASK_EVERY_S:
                asked_at = began
                if not still_wanted():
                    raise NoLongerWantedError
            done.update(batch.step())
            if (now := time.monotonic()) > deadline:
                raise CanaryError(
                    f"{len(done)} of {len(requests)} problems were answered within service.canary.timeout_s "
                    f"{self._config.timeout_s:g}"
                )
            time.sleep(now - began)
        answers = iter(done[index] for index in range(len(requests)))
        return [(work_unit, [next(answers) for _ in work_unit.requests]) for work_unit in self._work_units]
