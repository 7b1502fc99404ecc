"""d-OPSD's estimator: every decoding state, with all masked slots of its block scored; and the future that it lacks.

See arXiv 2606.18195, and its code. A self-teacher sees some slots of later blocks besides (`shown_future`), so that the
states of the canvas's last block are left out. So are those after the text is complete.

Shape letters: B rows, L completion slots, R canvases, K denoise steps of the row with the most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from learner.batch import GroupedBatch
from learner.counter import uniform
from learner.estimators.base import (
    EstimatorFacts,
    InnerUpdate,
    SamplerFacts,
    ScoredSlots,
    covered_slots,
    rewriting_refusal,
)
from learner.estimators.terms import Corruption
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

_FUTURE_KEY = 91


class StepStatesConfig(BaseModel):
    """Config of the estimator: the inner updates share the states of each completion, in the order of their steps."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Literal["step_states"] = "step_states"
    """The estimator."""

    @property
    def facts(self) -> EstimatorFacts:
        """Each state is a part, and a slot is masked in several states."""
        return EstimatorFacts(splits_tokens=True, splits_rows=True, parts_are_steps=True)

    def corrupt(self, batch: GroupedBatch, update: InnerUpdate, sampler: SamplerFacts) -> Corruption:
        """Return one canvas for each of the update's states: what was committed before a step is shown."""
        block_BL, is_denoised_BL = sampler.blocks(batch), covered_slots(batch, ScoredSlots.DENOISED)
        num_steps = int(batch.step_map.max().clamp(min=0)) + 1
        block_BK = torch.full((batch.num_rows, num_steps), -1, device=block_BL.device)
        rows_N, slots_N = is_denoised_BL.nonzero(as_tuple=True)
        block_BK[rows_N, batch.step_map[rows_N, slots_N]] = block_BL[rows_N, slots_N]
        last_B1 = batch.step_map.masked_fill(~batch.completion_mask(), -1).amax(dim=1, keepdim=True)
        is_before_end_BK = torch.arange(num_steps, device=block_BL.device) <= last_B1
        is_state_BK = (block_BK >= 0) & (block_BK < block_BL.amax(dim=1, keepdim=True)) & is_before_end_BK
        place_BK, count_B1 = is_state_BK.cumsum(dim=1) - 1, is_state_BK.sum(dim=1, keepdim=True)
        is_taken_BK = is_state_BK & (place_BK * update.count // count_B1.clamp(min=1) == update.index)
        rows_R, steps_R = is_taken_BK.nonzero(as_tuple=True)
        is_hidden_RL = ~is_denoised_BL[rows_R] | (batch.step_map[rows_R] >= steps_R[:, None])
        is_own_RL = block_BL[rows_R] == block_BK[rows_R, steps_R][:, None]
        scored_RL = is_hidden_RL & is_own_RL & is_denoised_BL[rows_R]
        return Corruption(rows=rows_R, masked=is_hidden_RL, scored=scored_RL, parts=steps_R)

    def mask_key(self, update: InnerUpdate) -> int:
        """Return the index of the update: each has other states."""
        return update.index

    def sizes(self, batch: GroupedBatch) -> Tensor:
        """Return the number of denoised slots, [B]."""
        return covered_slots(batch, ScoredSlots.DENOISED).sum(dim=1)

    def incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return why the sampler has no state with a later block to look at; None if it has."""
        if sampler.is_block_causal:
            return (
                "estimator step_states is for a teacher that sees later blocks, and a block-causal policy looks at "
                "earlier ones alone: take a bidirectional policy, or another learner.algorithm"
            )
        if (refusal := rewriting_refusal(self.name, sampler)) is not None:
            return refusal
        if sampler.num_blocks < 2:
            return (
                "estimator step_states leaves out the last block of a canvas, after which there is nothing to look at, "
                "and rollout.sampling has one block: take a block_length of at most half of gen_length"
            )
        return None


def num_states(sampler: SamplerFacts) -> int:
    """Return the most states of a completion: the denoise steps of all blocks but the last."""
    return sampler.max_denoise_steps * (sampler.num_blocks - 1) // sampler.num_blocks


def shown_future(batch: GroupedBatch, steps_B: Tensor, share: float, sampler: SamplerFacts) -> Tensor:
    """Sample the slots of later blocks that a teacher sees, [B, L] bool, in each row's state before a denoise step.

    They are `share` of the denoised ones, rounded down, at random; none if the text ends before the next block.
    """
    block_BL, slots_L = sampler.blocks(batch), torch.arange(batch.num_slots, device=steps_B.device)
    is_step_BL = batch.step_map == steps_B[:, None]
    block_B1 = block_BL.masked_fill(~is_step_BL, -1).amax(dim=1, keepdim=True)
    is_later_BL = (block_BL > block_B1) & (batch.step_map >= 0) & is_step_BL.any(dim=1, keepdim=True)
    num_words_B1 = (batch.completion_lengths - (~batch.truncated).long())[:, None]
    is_later_BL &= (is_later_BL & (slots_L < num_words_B1)).any(dim=1, keepdim=True)
    luck_BL = uniform(batch.sample_keys[:, None], _FUTURE_KEY, steps_B[:, None], slots_L)
    rank_BL = luck_BL.masked_fill(~is_later_BL, torch.inf).argsort(dim=1).argsort(dim=1)
    num_shown_B1 = (is_later_BL.sum(dim=1, keepdim=True).double() * share).long()
    return is_later_BL & (rank_BL < num_shown_B1)
