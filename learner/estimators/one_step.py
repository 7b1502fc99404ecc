"""The one-step masked likelihood estimate of diffu-GRPO (d1, arXiv 2504.12216, section 3.2).

The whole completion is masked, each prompt token is masked with a small probability, and one forward gives a
log-probability of every completion token at once. It is a mean-field value: the estimate of a token does not depend
on the other completion tokens. Masking the prompt at random makes each inner update see another view of the same
completions, a regulariser that lets one round be used for several updates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from learner.batch import GroupedBatch
from learner.estimators.base import EstimatorFacts, InnerUpdate, Probability, SamplerFacts, prompt_mask
from learner.estimators.terms import Corruption
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

_ACCUMULATED = 2


class OneStepConfig(BaseModel):
    """diffu-GRPO's estimator: one forward, all completion slots masked."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Literal["one_step"] = "one_step"
    """The estimator."""
    p_mask_prompt: Probability = 0.15
    """Probability that a prompt token is masked (d1: 0.15)."""
    prompt_mask: Literal["each_update", "fixed", "micro_step"] = "each_update"
    """`each_update` draws another prompt mask at every inner update; `fixed` keeps one, as d1 with random_masking off;
    `micro_step` numbers them by micro-step as d1 does, so that with its two micro-steps for each update a group meets
    half of the masks, each twice."""

    @property
    def facts(self) -> EstimatorFacts:
        """One canvas scores all tokens of a completion."""
        return EstimatorFacts()

    def corrupt(self, batch: GroupedBatch, update: InnerUpdate, sampler: SamplerFacts) -> Corruption:
        """Score each row's completion tokens up to the end of text, on a canvas of its prompt alone.

        Without prompt masks all completions of a problem share one canvas, and so one forward.
        """
        key: Tensor | int = self.mask_key(update)
        if self.prompt_mask == "micro_step":
            key = (_ACCUMULATED * update.index + batch.group_index[:, None] % _ACCUMULATED) % update.count
        return Corruption(
            rows=torch.arange(batch.num_rows, device=batch.prompt_ids.device),
            masked=torch.ones_like(batch.completion_ids, dtype=torch.bool),
            scored=batch.completion_mask(),
            prompt_masked=prompt_mask(batch, self.p_mask_prompt, key),
        )

    def mask_key(self, update: InnerUpdate) -> int:
        """One mask for all updates where it is fixed or there is none."""
        return 0 if self.prompt_mask == "fixed" or self.p_mask_prompt == 0 else update.index

    def sizes(self, batch: GroupedBatch) -> Tensor:
        """The text's tokens."""
        return batch.completion_lengths

    def refusal(self, sampler: SamplerFacts) -> str | None:
        """It needs tokens only."""
        return None
