"""SPG's block-wise masks: training canvases that resemble those of a block-wise sampler.

A random block is partly masked, everything after it is masked, and everything before it, including the prompt, is
masked with a small probability (arXiv 2510.09541, section 3.3).

Shape letters: B rows, L completion slots, R canvases, W blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from learner.batch import GroupedBatch
from learner.counter import uniform
from learner.estimators.base import EstimatorFacts, InnerUpdate, Probability, RowValue, SamplerFacts, repeat_rows
from learner.estimators.terms import Corruption
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK_KEY, _COUNT_KEY, _SLOT_KEY, _CLEAN_KEY, _PROMPT_KEY = 51, 52, 53, 54, 55


class BlockMasksConfig(BaseModel):
    """Config of SPG's estimator."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Literal["block_masks"] = "block_masks"
    """The estimator."""
    num_draws: PositiveInt = 2
    """Canvases per completion (SPG and StableDRL: 2)."""
    block_length: PositiveInt | None = None
    """Slots of a block; null: the sampler's."""
    p_mask_clean: Probability = 0.15
    """Probability that a token of the prompt or of an earlier block is masked."""

    @property
    def facts(self) -> EstimatorFacts:
        """Each draw scores another set of tokens, and the sets overlap."""
        return EstimatorFacts(
            row_value=RowValue.MASKED_MEAN, splits_tokens=self.num_draws > 1, splits_rows=self.num_draws > 1
        )

    def corrupt(self, batch: GroupedBatch, update: InnerUpdate, sampler: SamplerFacts) -> Corruption:
        """Return `num_draws` canvases per row. A row's value is the mean over draws of the mean over scored tokens."""
        rows_R, draws_R = repeat_rows(batch, self.num_draws)
        masked_RL = self._masked(batch, rows_R, draws_R, update.index, self.block_length or sampler.block_length)
        scored_RL = masked_RL & batch.completion_mask()[rows_R]
        columns_P = torch.arange(batch.prompt_ids.shape[1], device=rows_R.device)
        keys_R1 = batch.sample_keys[rows_R, None]
        prompt_RP = uniform(keys_R1, update.index, _PROMPT_KEY, draws_R[:, None], columns_P) < self.p_mask_clean
        weight_R = 1 / (scored_RL.sum(dim=1).clamp(min=1) * self.num_draws)
        return Corruption(
            rows=rows_R,
            masked=masked_RL,
            scored=scored_RL,
            prompt_masked=prompt_RP,
            parts=draws_R,
            weights=weight_R[:, None].expand(masked_RL.shape),
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

    def _masked(
        self, batch: GroupedBatch, rows_R: Tensor, draws_R: Tensor, update_index: int, block_length: int
    ) -> Tensor:
        """Choose the masked slots, [R, L] bool."""
        keys_R, slots_L = batch.sample_keys[rows_R], torch.arange(batch.num_slots, device=rows_R.device)
        lengths_R = batch.completion_lengths[rows_R]
        num_blocks_R = -(-lengths_R // block_length)
        # Draws take consecutive blocks from a random start, so that the first few of a row are of different blocks.
        start_R = (uniform(keys_R, update_index, _BLOCK_KEY) * num_blocks_R).long()
        block_R = (start_R + draws_R) % num_blocks_R.clamp(min=1)
        begin_R = block_R * block_length
        end_R = begin_R + block_length
        valid_R = lengths_R.minimum(end_R) - begin_R
        count_R = 1 + (uniform(keys_R, update_index, _COUNT_KEY, draws_R) * valid_R).long()
        inside_RL = (slots_L >= begin_R[:, None]) & (slots_L < (begin_R + valid_R)[:, None])
        noise_RL = uniform(keys_R[:, None], update_index, _SLOT_KEY, draws_R[:, None], slots_L)
        rank_RL = noise_RL.masked_fill(~inside_RL, 2).argsort(dim=1).argsort(dim=1)
        clean_RL = uniform(keys_R[:, None], update_index, _CLEAN_KEY, draws_R[:, None], slots_L)
        before_RL = (slots_L < begin_R[:, None]) & (clean_RL < self.p_mask_clean)
        after_RL = slots_L >= end_R.minimum(lengths_R)[:, None]
        return (inside_RL & (rank_RL < count_R[:, None])) | before_RL | after_RL
