"""Masked supervised fine-tuning: the denoising loss of LLaDA on completions.

Each row draws a mask ratio t ~ U(0, 1], masks its completion slots with probability t (the prompt never), and pays
CE / t on the masked slots: an upper bound on the negative log-likelihood (LLaDA, arXiv 2502.09992, algorithm 2).
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from learner.batch import CompletionBatch, canvas
from learner.counter import fold, uniform
from learner.estimators.views import Views, share_equal_views
from learner.model.transformer import TransformerConfig

_MIN_T = 1e-3
_T_KEY, _SLOT_KEY, _ORDER_KEY = 1, 2, 3


class SftConfig(BaseModel):
    """Stage 1: masked SFT on labelled problems."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    num_labels: PositiveInt
    """Labelled training problems. More optimizer steps reuse the same labels under other masks."""
    num_steps: NonNegativeInt
    """Optimizer steps; 0 skips the stage."""
    batch_size: PositiveInt = 64
    """Rows of an optimizer step, over all workers."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate, reached after `num_warmup_steps`, then falling linearly to a tenth."""
    num_warmup_steps: NonNegativeInt = 20
    """Steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """AdamW's."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""

    def lr_at(self, step: int, progress: float) -> float:
        """The learning rate of an optimizer step, `progress` (0 to 1) of the stage being done."""
        return self.lr * min(1.0, (step + 1) / (self.num_warmup_steps + 1)) * (1.0 - 0.9 * progress)


def sft_rows(num_labels: int, batch_size: int, step: int, seed: int) -> Tensor:
    """The rows [batch_size] of an optimizer step: each epoch is its own permutation of the labels."""
    positions = torch.arange(step * batch_size, (step + 1) * batch_size)
    rows = torch.empty_like(positions)
    for epoch in (positions // num_labels).unique().tolist():
        order = uniform(torch.tensor(fold(seed, _ORDER_KEY, epoch)), torch.arange(num_labels)).argsort()
        inside = positions // num_labels == epoch
        rows[inside] = order[positions[inside] % num_labels]
    return rows


def plan_sft(batch: CompletionBatch, model: TransformerConfig, step: int, seed: int) -> tuple[Views, Tensor]:
    """The masked canvases of one step, and the weight [N] of each masked slot: 1 / t of its row.

    All completion slots count, the end-of-text fill included: that is how the policy learns to stop.
    Rows that only fill a shard mask nothing.
    """
    keys = batch.sample_keys
    t_B = _MIN_T + (1 - _MIN_T) * uniform(keys, seed, step, _T_KEY)
    slots_L = torch.arange(batch.num_slots, device=keys.device)
    masked_BL = uniform(keys[:, None], seed, step, _SLOT_KEY, slots_L) < t_B[:, None]
    masked_BL &= (batch.completion_lengths > 0)[:, None]
    completion_ids = torch.where(masked_BL, model.mask_token_id, batch.completion_ids)
    ids_BS, columns_BL = canvas(batch, batch.prompt_ids, completion_ids, model.pad_token_id)
    rows_N, slots_N = masked_BL.nonzero(as_tuple=True)
    lengths_B = batch.prompt_lengths + batch.num_slots
    targets_N = batch.completion_ids[rows_N, slots_N]
    views = share_equal_views(ids_BS, lengths_B, rows_N, columns_BL[rows_N, slots_N], targets_N)
    return views, 1.0 / t_B[rows_N]
