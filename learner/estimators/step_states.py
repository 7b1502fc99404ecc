"""Decoding states whose masked slots are all scored: those of the state's block (d-OPSD), or of the text (RLDF).

d-OPSD (arXiv 2606.18195, and its code) takes every state. A self-teacher sees some slots of later blocks besides
(`shown_future`), so that the states of the canvas's last block are left out. So are those after the text is complete.

RLDF (arXiv 2605.25638, and its code) samples a few states of each completion: the less probable the tokens were that
the sampler committed there, the more often.

Shape letters: B rows, L completion slots, R canvases, K denoise steps of the row with the most, D draws of a row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from learner.batch import GroupedBatch
from learner.counter import uniform
from learner.estimators.base import EstimatorFacts, InnerUpdate, SamplerFacts, ScoredSlots, covered_slots
from learner.estimators.terms import Corruption
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

_FUTURE_KEY, _CHOICE_KEY, _REPEAT_KEY = 91, 92, 93
_MIN_LOGP = math.log(1e-10)


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
        if sampler.edits:
            return (
                "estimator step_states takes each token to be written once, and rollout.sampling.editing_threshold "
                "has tokens written more than once: leave editing_threshold out"
            )
        if sampler.num_blocks < 2:
            return (
                "estimator step_states leaves out the last block of a canvas, after which there is nothing to look at, "
                "and rollout.sampling has one block: take a block_length of at most half of gen_length"
            )
        return None


class SampledStatesConfig(BaseModel):
    """Config of the estimator: a few states of each completion, with all masked slots of the text scored (RLDF)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Literal["sampled_states"] = "sampled_states"
    """The estimator."""
    num_sampled: PositiveInt = 4
    """States of each completion, without replacement. A completion with fewer has all of them, and draws the rest again
    with replacement."""
    temperature: PositiveFloat = 1.0
    """A state is drawn with a probability proportional to e^(surprise / temperature). Its surprise is the mean negative
    log-probability, nats, of the text tokens that the sampler committed there."""

    @property
    def facts(self) -> EstimatorFacts:
        """Each draw is a part, and a slot is masked in several states."""
        return EstimatorFacts(splits_tokens=True, splits_rows=True)

    def corrupt(self, batch: GroupedBatch, update: InnerUpdate, sampler: SamplerFacts) -> Corruption:
        """Return one canvas for each drawn state; all inner updates share them."""
        text_BL = batch.completion_mask() & (batch.step_map >= 0)
        step_BD = self._drawn_steps(batch, text_BL)
        rows_R, parts_R = (step_BD >= 0).nonzero(as_tuple=True)
        step_R1, step_RL = step_BD[rows_R, parts_R][:, None], batch.step_map[rows_R]
        # Slots after the last denoised block were never committed, and are always masked.
        masked_RL = (step_RL >= step_R1) | (step_RL < 0)
        return Corruption(
            rows=rows_R,
            masked=masked_RL,
            scored=masked_RL & text_BL[rows_R],
            parts=parts_R,
            committed=step_RL == step_R1,
        )

    def mask_key(self, update: InnerUpdate) -> int:
        """Return 0: the states do not depend on the update."""
        return 0

    def sizes(self, batch: GroupedBatch) -> Tensor:
        """Return the number of text slots, [B]."""
        return batch.completion_lengths

    def incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return why the sampler's states cannot be scored like this; None if they can."""
        if sampler.is_block_causal:
            return (
                "estimator sampled_states scores the masked slots of all blocks, and a block-causal policy does not "
                "see later ones: take a bidirectional policy, or another learner.algorithm"
            )
        if sampler.edits:
            return (
                "estimator sampled_states takes each token to be written once, and rollout.sampling.editing_threshold "
                "has tokens written more than once: leave editing_threshold out"
            )
        return None

    def _drawn_steps(self, batch: GroupedBatch, text_BL: Tensor) -> Tensor:
        """Return the denoise steps of the drawn states, [B, D] int64; -1 in rows without text, which pad a shard."""
        num_steps = int(batch.step_map.max().clamp(min=0)) + 1
        step_BL = batch.step_map.clamp(min=0)
        count_BK = torch.zeros(batch.num_rows, num_steps, device=step_BL.device)
        surprise_BK = count_BK.scatter_add(1, step_BL, -batch.commit_logp.clamp(min=_MIN_LOGP) * text_BL)
        count_BK = count_BK.scatter_add(1, step_BL, text_BL.float())
        score_BK = surprise_BK / count_BK.clamp(min=1) / self.temperature
        score_BK = score_BK.masked_fill(count_BK == 0, -torch.inf)
        # The steps of the greatest sums of score and Gumbel noise are a sample without replacement.
        keys_B1, steps_K = batch.sample_keys[:, None], torch.arange(num_steps, device=step_BL.device)
        noise_BK = -(-uniform(keys_B1, _CHOICE_KEY, steps_K).log()).log()
        order_BK = (score_BK + noise_BK).argsort(dim=1, descending=True, stable=True)
        draws_D = torch.arange(self.num_sampled, device=step_BL.device)
        num_states_B1 = (count_BK > 0).sum(dim=1, keepdim=True)
        first_BD = order_BK.gather(1, draws_D.clamp(max=num_steps - 1).expand(batch.num_rows, -1))
        chance_BK = score_BK.softmax(dim=1).nan_to_num().cumsum(dim=1)
        luck_BD = uniform(keys_B1, _REPEAT_KEY, draws_D)
        again_BD = torch.searchsorted(chance_BK, luck_BD * chance_BK[:, -1:], right=True).clamp(max=num_steps - 1)
        return torch.where(draws_D < num_states_B1, first_BD, again_BD).masked_fill(num_states_B1 == 0, -1)


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
