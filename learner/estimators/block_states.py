"""OPDLM's estimator: a random decoding state of each block, with all its masked slots scored.

See arXiv 2606.06712, and its code: one state per block. A block has one state for each denoise step that committed a
token of it. A state shows the tokens of earlier steps and masks the others of the block.

Shape letters: B rows, L completion slots, R canvases, G blocks of all rows, K different steps of all blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from learner.batch import GroupedBatch
from learner.counter import uniform
from learner.estimators.base import EstimatorFacts, InnerUpdate, SamplerFacts, rewriting_refusal
from learner.estimators.terms import Corruption
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

_STATE_KEY = 81


class BlockStatesConfig(BaseModel):
    """Config of the estimator: a state of each block is sampled uniformly at every update."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Literal["block_states"] = "block_states"
    """The estimator."""
    scores_end: bool = False
    """Whether the end of text is scored too (OPDLM: not)."""

    @property
    def facts(self) -> EstimatorFacts:
        """Each block of a completion has a separate canvas."""
        return EstimatorFacts(splits_rows=True)

    def corrupt(self, batch: GroupedBatch, update: InnerUpdate, sampler: SamplerFacts) -> Corruption:
        """Return one canvas per block with a masked slot to score: earlier blocks are shown, later ones masked."""
        block_BL = sampler.blocks(batch)
        is_denoised_BL = batch.step_map >= 0
        # Slots after the last denoised block were never committed, and are always masked.
        hidden_BL = ~is_denoised_BL | (batch.step_map >= _sample_steps(batch, block_BL, update))
        scored_BL = hidden_BL & is_denoised_BL & self._covered(batch)
        num_blocks = int(block_BL.max()) + 1
        has_scored_BN = torch.zeros(batch.num_rows, num_blocks, dtype=torch.bool, device=block_BL.device)
        rows_N, slots_N = scored_BL.nonzero(as_tuple=True)
        has_scored_BN[rows_N, block_BL[rows_N, slots_N]] = True
        rows_R, parts_R = has_scored_BN.nonzero(as_tuple=True)
        block_RL, hidden_RL = block_BL[rows_R], hidden_BL[rows_R]
        is_own_RL = block_RL == parts_R[:, None]
        is_later_RL = block_RL > parts_R[:, None]
        return Corruption(
            rows=rows_R,
            masked=is_later_RL | (is_own_RL & hidden_RL) | ~is_denoised_BL[rows_R],
            scored=is_own_RL & scored_BL[rows_R],
            parts=parts_R,
        )

    def mask_key(self, update: InnerUpdate) -> int:
        """Return the index of the update: each has new states."""
        return update.index

    def sizes(self, batch: GroupedBatch) -> Tensor:
        """Return the number of tokens that may be scored, [B]."""
        return self._covered(batch).sum(dim=1)

    def incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return why token editing is not supported: a state is derived from the step that committed each token."""
        return rewriting_refusal(self.name, sampler)

    def _covered(self, batch: GroupedBatch) -> Tensor:
        """Return the text's slots, [B, L] bool, without the end of text unless `scores_end`."""
        is_text_BL = batch.completion_mask()
        if self.scores_end:
            return is_text_BL
        slots_L = torch.arange(batch.num_slots, device=is_text_BL.device)
        is_end_BL = (slots_L == batch.completion_lengths[:, None] - 1) & ~batch.truncated[:, None]
        return is_text_BL & ~is_end_BL


def _sample_steps(batch: GroupedBatch, block_BL: Tensor, update: InnerUpdate) -> Tensor:
    """Sample the denoise step before which each slot's block is shown, [B, L] int64."""
    num_blocks, num_steps = int(block_BL.max()) + 1, int(batch.step_map.max().clamp(min=0)) + 1
    rows_B1 = torch.arange(batch.num_rows, device=block_BL.device)[:, None]
    of_block_BL = rows_B1 * num_blocks + block_BL
    is_denoised_BL = batch.step_map >= 0
    keys_K = (of_block_BL * num_steps + batch.step_map)[is_denoised_BL].unique()
    count_G = (keys_K // num_steps).bincount(minlength=batch.num_rows * num_blocks)
    luck_BN = uniform(batch.sample_keys[:, None], update.index, _STATE_KEY, torch.arange(num_blocks))
    place_G = (luck_BN.flatten() * count_G).long().minimum((count_G - 1).clamp(min=0))
    # A block that was not denoised has no step, and its value is not used.
    chosen_G = (count_G.cumsum(0) - count_G + place_G).clamp(max=max(0, len(keys_K) - 1))
    step_G = keys_K[chosen_G] % num_steps if len(keys_K) else torch.zeros_like(count_G)
    return step_G[of_block_BL]
