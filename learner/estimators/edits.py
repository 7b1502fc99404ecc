"""Decoding states under token editing (LLaDA2.1, arXiv 2602.08676): one for each denoise step.

The canvas before a step shows the last token written to each slot. The step's writes are scored on it, whether they
fill a masked slot or replace a token. Slots are chosen from the predictions alone, so the sum over all writes is the
exact log-likelihood of the trajectory.

Shape letters: B rows, L completion slots, E writes of the row with the most, K denoise steps, R canvases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from learner.batch import GroupedBatch
from learner.estimators.terms import Corruption
from learner.estimators.views import ScoringDistribution
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


def steps_to_score(batch: GroupedBatch, writes_BE3: Tensor) -> Tensor:
    """Return the denoise steps that write to a slot of the text, [B, K] bool."""
    rows_N, events_N = _of_text(batch, writes_BE3).nonzero(as_tuple=True)
    steps_BE = writes_BE3[:, :, 0]
    num_steps = int(steps_BE.max().clamp(min=0)) + 1 if steps_BE.numel() else 1
    has_scored_BK = torch.zeros(batch.num_rows, num_steps, dtype=torch.bool, device=writes_BE3.device)
    has_scored_BK[rows_N, steps_BE[rows_N, events_N]] = True
    return has_scored_BK


def edited(
    batch: GroupedBatch,
    writes_BE3: Tensor,
    write_logp_BE: Tensor,
    importance_BK: Tensor,
    distribution: ScoringDistribution,
) -> Corruption:
    """Build one canvas for each step with a nonzero weight.

    Args:
        batch: the completions.
        writes_BE3: as `RolloutBatch.writes`.
        write_logp_BE: as `RolloutBatch.write_logp`.
        importance_BK: the weight in the loss of each step's writes.
        distribution: the distribution that tokens are scored under.
    """
    rows_R, steps_R = (importance_BK > 0).nonzero(as_tuple=True)
    step_RE, slot_RE, token_RE = writes_BE3[rows_R].unbind(dim=2)
    is_write_RE = step_RE >= 0
    slot_RE = slot_RE.clamp(min=0)
    # Writes are in the order of their steps: a slot shows the last write to it before this step.
    order_E = torch.arange(1, step_RE.shape[1] + 1, device=step_RE.device)
    before_RE = torch.where(is_write_RE & (step_RE < steps_R[:, None]), order_E, 0)
    last_RL = torch.zeros(len(rows_R), batch.num_slots, dtype=torch.int64, device=step_RE.device)
    last_RL.scatter_reduce_(1, slot_RE, before_RE, "amax")
    rows_N, events_N = (_of_text(batch, writes_BE3)[rows_R] & (step_RE == steps_R[:, None])).nonzero(as_tuple=True)
    where = rows_N, slot_RE[rows_N, events_N]
    scored_RL = torch.zeros_like(last_RL, dtype=torch.bool)
    targets_RL, recorded_RL = torch.zeros_like(last_RL), torch.zeros_like(last_RL, dtype=write_logp_BE.dtype)
    scored_RL[where] = True
    targets_RL[where] = token_RE[rows_N, events_N]
    recorded_RL[where] = write_logp_BE[rows_R][rows_N, events_N]
    return Corruption(
        rows=rows_R,
        masked=last_RL == 0,
        scored=scored_RL,
        parts=steps_R,
        importance=importance_BK[rows_R, steps_R][:, None].expand_as(scored_RL),
        distribution=distribution,
        shown=token_RE.gather(1, (last_RL - 1).clamp(min=0)),
        targets=targets_RL,
        recorded=recorded_RL,
    )


def _of_text(batch: GroupedBatch, writes_BE3: Tensor) -> Tensor:
    """Return the writes to slots of the text, up to and including its first end of text, [B, E] bool."""
    return (writes_BE3[:, :, 0] >= 0) & (writes_BE3[:, :, 1] < batch.completion_lengths[:, None])
