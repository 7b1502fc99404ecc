"""Token likelihoods on canvases whose completion is partly masked at random.

coupled-GRPO (DiffuCoder, arXiv 2506.20639) scores each token once fully masked and once in one of a mask and its
complement; UniGRPO (MMaDA, arXiv 2505.15809) draws one mask for each update, of ratios spread over the diffusion time.

Shape letters: B rows, L completion slots, R canvases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from learner.batch import GroupedBatch
from learner.counter import uniform
from learner.estimators.base import EstimatorFacts, InnerUpdate, SamplerFacts
from learner.estimators.terms import Corruption
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

_RATIO_KEY, _MASK_KEY = 31, 32
Ratio = Annotated[float, Field(ge=0, le=1)]


class RandomMasksConfig(BaseModel):
    """Random masks at a ratio t, drawn anew at every update."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Literal["random_masks"] = "random_masks"
    """The estimator."""
    min_ratio: Ratio = 0.2
    """Least share of masked slots, t."""
    max_ratio: Ratio = 0.8
    """Greatest share of masked slots."""
    ratios: Literal["each_update", "spread"] = "each_update"
    """`each_update` draws one t for all rows of an update (DiffuCoder); `spread` starts each row somewhere and goes on
    evenly over the range, so that the updates of a round cover it (UniGRPO)."""
    coupled: bool = True
    """Run the complement of each mask too, and the fully masked canvas: a token's value is half its log-probability
    there and half 1 / t or 1 / (1 - t) times the one under the mask that hides it."""

    @model_validator(mode="after")
    def _ordered(self) -> RandomMasksConfig:
        if self.min_ratio > self.max_ratio:
            raise ValueError(f"min_ratio {self.min_ratio} is above max_ratio {self.max_ratio}")
        if self.coupled and (self.min_ratio == 0 or self.max_ratio == 1):
            raise ValueError("a coupled mask needs ratios above 0 and below 1")
        return self

    @property
    def facts(self) -> EstimatorFacts:
        """Coupled masks score a token on two of their three canvases."""
        return EstimatorFacts(splits_tokens=self.coupled, splits_rows=self.coupled)

    def corrupt(self, batch: GroupedBatch, update: InnerUpdate, sampler: SamplerFacts) -> Corruption:
        """One canvas for each row, or with `coupled` three: all masked, the mask, its complement."""
        rows_B = torch.arange(batch.num_rows, device=batch.prompt_ids.device)
        slots_L = torch.arange(batch.num_slots, device=rows_B.device)
        ratio_B = self._ratios(batch, update)
        drawn_BL = uniform(batch.sample_keys[:, None], update.index, _MASK_KEY, slots_L) < ratio_B[:, None]
        if not self.coupled:
            return Corruption(rows=rows_B, masked=drawn_BL, scored=drawn_BL & batch.completion_mask())
        masked = torch.stack((torch.ones_like(drawn_BL), drawn_BL, ~drawn_BL), dim=1).flatten(0, 1)
        weights_B3 = torch.stack((torch.ones_like(ratio_B), 1 / ratio_B, 1 / (1 - ratio_B)), dim=1) / 2
        rows_R = rows_B.repeat_interleave(3)
        return Corruption(
            rows=rows_R,
            masked=masked,
            scored=masked & batch.completion_mask()[rows_R],
            parts=torch.arange(3, device=rows_B.device).repeat(batch.num_rows),
            weights=weights_B3.flatten()[:, None].expand_as(masked),
        )

    def mask_key(self, update: InnerUpdate) -> int:
        """Other masks at every update."""
        return update.index

    def sizes(self, batch: GroupedBatch) -> Tensor:
        """The text's tokens."""
        return batch.completion_lengths

    def refusal(self, sampler: SamplerFacts) -> str | None:
        """It needs tokens only."""
        return None

    def _ratios(self, batch: GroupedBatch, update: InnerUpdate) -> Tensor:
        """[B] t, at least one slot's worth."""
        if self.ratios == "each_update":
            place_B = uniform(batch.round_keys, update.index, _RATIO_KEY)
        else:
            place_B = (uniform(batch.sample_keys, _RATIO_KEY) + update.index / update.count) % 1
        return (self.min_ratio + (self.max_ratio - self.min_ratio) * place_B).clamp(min=1 / batch.num_slots)
