"""The one-step masked likelihood estimate of diffu-GRPO (d1, arXiv 2504.12216, section 3.2).

The whole completion is masked, each prompt token is masked with a small probability, and one forward gives a
log-probability of every completion token at once. It is a mean-field value: the estimate of a token does not depend
on the other completion tokens. Masking the prompt at random makes each inner update see another view of the same
completions, a regulariser that lets one round be used for several updates.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from learner.batch import CompletionBatch, canvas
from learner.counter import uniform
from learner.estimators.views import Views, share_equal_views
from learner.model.transformer import TransformerConfig


class OneStepConfig(BaseModel):
    """diffu-GRPO's estimator."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Literal["one_step"] = "one_step"
    """The estimator."""
    p_mask_prompt: Annotated[float, Field(ge=0, lt=1)] = 0.15
    """Probability that a prompt token is masked (d1: 0.15)."""
    prompt_mask: Literal["each_update", "fixed"] = "each_update"
    """`each_update` draws another prompt mask at every inner update; `fixed` keeps one, as d1 with random_masking off.
    (d1 indexes its masks by micro-step, so that with accumulation 2 half of them are never used.)"""


class OneStep:
    """Plans the views of the one-step estimate."""

    def __init__(self, config: OneStepConfig, model: TransformerConfig) -> None:
        self.config = config
        self._model = model

    def plan(self, batch: CompletionBatch, inner_update: int) -> Views:
        """Score each row's completion tokens up to the end of text, in row order.

        Without prompt masks all completions of a problem share one canvas, and so one forward.
        """
        view_key = inner_update if self.config.prompt_mask == "each_update" else 0
        P = batch.prompt_ids.shape[1]
        columns_P = torch.arange(P, device=batch.prompt_ids.device)
        is_masked = uniform(batch.sample_keys[:, None], view_key, columns_P) < self.config.p_mask_prompt
        prompt_ids = torch.where(is_masked, self._model.mask_token_id, batch.prompt_ids)
        completion_ids = torch.full_like(batch.completion_ids, self._model.mask_token_id)
        ids_BS, columns_BL = canvas(batch, prompt_ids, completion_ids, self._model.pad_token_id)
        rows_N, slots_N = batch.completion_mask().nonzero(as_tuple=True)
        lengths_B = batch.prompt_lengths + batch.num_slots
        targets_N = batch.completion_ids[rows_N, slots_N]
        return share_equal_views(ids_BS, lengths_B, rows_N, columns_BL[rows_N, slots_N], targets_N)
