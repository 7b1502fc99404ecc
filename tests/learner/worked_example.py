"""Worked example of docs/algorithms.md: an estimator, its row of `ALGORITHMS` and its float64 restatement.

A block-wise sampler begins a block in this state: what precedes the block is shown, the block and the rest are masked.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from learner.batch import GroupedBatch
from learner.counter import uniform
from learner.estimators.base import EstimatorFacts, InnerUpdate, SamplerFacts
from learner.estimators.terms import Corruption
from tests.learner.slow import Row, group_mean, ppo

# Differs from the keys of all other draws.
_BLOCK_KEY = 61


class BlockStartConfig(BaseModel):
    """One random block of each completion, another one at every update."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Literal["block_start"] = "block_start"
    """The estimator."""

    @property
    def facts(self) -> EstimatorFacts:
        """A completion is scored on one canvas."""
        return EstimatorFacts()

    def corrupt(self, batch: GroupedBatch, update: InnerUpdate, sampler: SamplerFacts) -> Corruption:
        """One canvas for each row."""
        slots_L = torch.arange(batch.num_slots, device=batch.completion_ids.device)
        num_blocks_B = -(-batch.completion_lengths // sampler.block_length)
        block_B = (uniform(batch.sample_keys, update.index, _BLOCK_KEY) * num_blocks_B).long()
        begin_B1 = block_B[:, None] * sampler.block_length
        masked_BL = slots_L >= begin_B1
        scored_BL = masked_BL & (slots_L < begin_B1 + sampler.block_length) & batch.completion_mask()
        return Corruption(rows=torch.arange(batch.num_rows, device=slots_L.device), masked=masked_BL, scored=scored_BL)

    def mask_key(self, update: InnerUpdate) -> int:
        """Other blocks at every update."""
        return update.index

    def sizes(self, batch: GroupedBatch) -> Tensor:
        """The text's tokens."""
        return batch.completion_lengths

    def incompatibility(self, sampler: SamplerFacts) -> str | None:
        """It needs tokens only."""
        return None


ROW: dict[str, dict[str, Any]] = {
    "block-start": {
        "inner_updates": 2,
        "estimator": {"name": "block_start"},
        "objective": {"name": "clipped_ratio", "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0},
    }
}


def block_start(rows: list[Row]) -> Tensor:
    """Restate the loss, one completion and token at a time, from the paper and not from the code."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, advantage in zip(rows, group_mean(rows), strict=True):
        for draw in row.draws:
            begin = min(draw.masked)
            assert draw.masked == list(range(begin, row.width)), "shown before the block, masked from it on"
            for slot in range(begin, min(begin + 4, row.length)):
                total = total + ppo((draw.new[slot] - draw.old[slot]).exp(), advantage, 0.2, 0.2)
                count += 1
    return total / count
