"""The random-masks estimator: token likelihoods on randomly masked completions.

coupled-GRPO (DiffuCoder, arXiv 2506.20639) scores each token once on the fully masked canvas, and once under either a
mask or its complement. UniGRPO (MMaDA, arXiv 2505.15809) samples one mask per update, with ratios spread over the
diffusion time.

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
    """Config of the estimator: random masks at a ratio t, new at every update."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Literal["random_masks"] = "random_masks"
    """The estimator."""
    min_ratio: Ratio = 0.2
    """Minimum share of masked slots, t."""
    max_ratio: Ratio = 0.8
    """Maximum share of masked slots."""
    ratios: Literal["each_update", "spread"] = "each_update"
    """`each_update` samples one t for all rows of an update (DiffuCoder). `spread` gives each row a random start, and
    spaces its ratios evenly, so that the updates of a round cover the range (UniGRPO)."""
    coupled: bool = True
    """Run the complement of each mask too, and the fully masked canvas. A token's value is the mean of its
    log-probability there, and of 1 / t or 1 / (1 - t) times that under the mask that hides it."""

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
        """Return one canvas per row, or with `coupled` three: fully masked, the mask, its complement."""
        rows_B = torch.arange(batch.num_rows, device=batch.prompt_ids.device)
        slots_L = torch.arange(batch.num_slots, device=rows_B.device)
        ratio_B = self._ratios(batch, update)
        sampled_BL = uniform(batch.sample_keys[:, None], update.index, _MASK_KEY, slots_L) < ratio_B[:, None]
        if not self.coupled:
            return Corruption(rows=rows_B, masked=sampled_BL, scored=sampled_BL & batch.completion_mask())
        masked = torch.stack((torch.ones_like(sampled_BL), sampled_BL, ~sampled_BL), dim=1).flatten(0, 1)
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
        """Return the index of the update: each has new masks."""
        return update.index

    def sizes(self, batch: GroupedBatch) -> Tensor:
        """Return the number of tokens of each text, [B]."""
        return batch.completion_lengths

    def incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return None: it needs only the tokens, of any sampler."""
        return None

    def _ratios(self, batch: GroupedBatch, update: InnerUpdate) -> Tensor:
        """Return the mask ratios t, [B], each at least 1 / L."""
        if self.ratios == "each_update":
            place_B = uniform(batch.round_keys, update.index, _RATIO_KEY)
        else:
            place_B = (uniform(batch.sample_keys, _RATIO_KEY) + update.index / update.count) % 1
        return (self.min_ratio + (self.max_ratio - self.min_ratio) * place_B).clamp(min=1 / batch.num_slots)
