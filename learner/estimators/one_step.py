"""The one-step masked likelihood estimate of diffu-GRPO (d1, arXiv 2504.12216, section 3.2).

The whole completion is masked, each prompt token is masked with a small probability, and one forward gives the
log-probability of every completion token. It is a mean-field estimate: that of a token does not depend on the other
completion tokens. Random prompt masks show each inner update another view of the same completions. This regularises,
so that one round can be used for several updates.
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
    """Config of diffu-GRPO's estimator: one forward, all completion slots masked."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Literal["one_step"] = "one_step"
    """The estimator."""
    p_mask_prompt: Probability = 0.15
    """Probability that a prompt token is masked (d1: 0.15)."""
    prompt_mask: Literal["each_update", "fixed", "micro_step"] = "each_update"
    """`each_update` samples a new prompt mask at every inner update. `fixed` keeps one, as d1 with random_masking off.
    `micro_step` numbers masks by micro-step as d1 does: with its two micro-steps per update, a group gets half of the
    masks, each twice."""

    @property
    def facts(self) -> EstimatorFacts:
        """One canvas scores all tokens of a completion."""
        return EstimatorFacts()

    def corrupt(self, batch: GroupedBatch, update: InnerUpdate, sampler: SamplerFacts) -> Corruption:
        """Score each row's completion tokens up to the end of text, on a canvas that shows only the prompt.

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
        """Return 0 if all updates share a mask or have none, else the index of the update."""
        return 0 if self.prompt_mask == "fixed" or self.p_mask_prompt == 0 else update.index

    def sizes(self, batch: GroupedBatch) -> Tensor:
        """Return the number of tokens of each text, [B]."""
        return batch.completion_lengths

    def incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return None: it needs only the tokens, of any sampler."""
        return None
