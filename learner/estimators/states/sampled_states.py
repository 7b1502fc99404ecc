"""RLDF's estimator: a few decoding states of each completion, with all masked slots of the text scored.

The less probable the tokens were that the sampler committed in a state, the more often it is sampled (arXiv 2605.25638,
and its code).

Shape letters: B rows, L completion slots, R canvases, K denoise steps of the row with the most, D draws of a row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from learner.batch import GroupedBatch
from learner.counter import uniform
from learner.estimators.base import EstimatorFacts, InnerUpdate, SamplerFacts, rewriting_refusal
from learner.estimators.terms import Corruption
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

_CHOICE_KEY, _REPEAT_KEY = 92, 93
_MIN_LOGP = math.log(1e-10)


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
        return EstimatorFacts(splits_tokens=True, splits_rows=True, parts_are_canvases=True)

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
        return rewriting_refusal(self.name, sampler)

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
