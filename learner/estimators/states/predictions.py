"""MDPO's estimator: all that a denoise step predicted, at the steps of largest advantage (arXiv 2508.13148).

A step predicts every masked slot of the canvas, and commits some of these tokens. All of them are scored in the state
before the step, as in MDPO's code. The trained steps of a completion are those whose advantages are the largest,
positive or negative.

Shape letters: B rows, L completion slots, R canvases, T denoise steps of the longest trajectory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from learner.batch import GroupedBatch
from learner.estimators.base import EstimatorFacts, InnerUpdate, SamplerFacts
from learner.estimators.terms import Corruption
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


class PredictionsConfig(BaseModel):
    """Config of the estimator: samplers record what each step predicts, and graders grade it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Literal["predictions"] = "predictions"
    """The estimator."""
    num_states: PositiveInt = 8
    """Denoise steps of a completion that are trained, or all of them if it has fewer (MDPO: 8)."""

    @property
    def facts(self) -> EstimatorFacts:
        """Each state is a part, and a slot is masked in several states."""
        return EstimatorFacts(splits_tokens=True, splits_rows=True, parts_are_steps=True, parts_are_canvases=True)

    def corrupt(self, batch: GroupedBatch, update: InnerUpdate, sampler: SamplerFacts) -> Corruption:
        """Return one canvas for each trained step: what was committed before the step is shown."""
        assert batch.step_answers is not None, "samplers record step answers for such a config"
        rows_R, steps_R = self._trained(batch).nonzero(as_tuple=True)
        step_RL = batch.step_map[rows_R]
        # Slots after the last denoised block were never committed, and are always masked.
        masked_RL = (step_RL < 0) | (step_RL >= steps_R[:, None])
        targets_RL = batch.step_answers[rows_R, steps_R].long()
        return Corruption(
            rows=rows_R,
            masked=masked_RL,
            scored=masked_RL & (targets_RL >= 0),
            parts=steps_R,
            targets=targets_RL,
            distribution=sampler.distribution,
        )

    def mask_key(self, update: InnerUpdate) -> int:
        """Return 0: all updates have the same canvases."""
        return 0

    def sizes(self, batch: GroupedBatch) -> Tensor:
        """Return the number of slots of a canvas, [B]: the first step predicts all of them."""
        return torch.full_like(batch.completion_lengths, batch.num_slots)

    def incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return why the sampler's steps cannot be scored; None if they can."""
        if not sampler.predicts_canvas:
            return (
                "estimator predictions needs samplers whose steps predict the whole canvas: a bidirectional policy, "
                "and rollout.sampling.cache none; take them, or another learner.algorithm"
            )
        if sampler.has_varying_steps:
            return (
                "estimator predictions compares the same denoise step of a group's completions, and the number of "
                "steps of rollout.sampling varies: leave out threshold, factor, entropy_bound and editing_threshold"
            )
        return None

    def _trained(self, batch: GroupedBatch) -> Tensor:
        """Return the steps [B, T] bool of largest absolute advantage, the earlier of equal ones, of those graded."""
        assert batch.step_rewards is not None, "graders grade step answers"
        is_graded_BT = ~batch.step_rewards.isnan() & (batch.completion_lengths > 0)[:, None]
        advantages_BT = batch.step_rewards * 0 if batch.step_advantages is None else batch.step_advantages
        size_BT = advantages_BT.abs().masked_fill(~is_graded_BT, -1.0)
        rank_BT = size_BT.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return is_graded_BT & (rank_BT < self.num_states)
