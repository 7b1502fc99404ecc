"""The states of a completion whose tokens were edited (LLaDA2.1, arXiv 2602.08676): one for each denoise step.

The canvas before a step shows in each slot what was written there last. The step's writes are scored on it, whether
they fill a masked slot or replace a token: choosing the slots looks at predictions alone, so the sum over all writes is
the exact log-likelihood of the trajectory.

Shape letters: B rows, L completion slots, E writes of the row with the most, K denoise steps, R canvases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from learner.batch import GroupedBatch
from learner.estimators.terms import Corruption
from learner.estimators.views import ScoringLaw
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


def wanted_steps(batch: GroupedBatch, writes_BE3: Tensor) -> Tensor:
    """[B, K] bool: the denoise steps that write to a slot of the text."""
    rows_N, events_N = _of_text(batch, writes_BE3).nonzero(as_tuple=True)
    steps_BE = writes_BE3[:, :, 0]
    num_steps = int(steps_BE.max().clamp(min=0)) + 1 if steps_BE.numel() else 1
    wanted_BK = torch.zeros(batch.num_rows, num_steps, dtype=torch.bool, device=writes_BE3.device)
    wanted_BK[rows_N, steps_BE[rows_N, events_N]] = True
    return wanted_BK


def edited(
    batch: GroupedBatch, writes_BE3: Tensor, write_logp_BE: Tensor, importance_BK: Tensor, law: ScoringLaw
) -> Corruption:
    """One canvas for each step that counts for something.

    Args:
        batch: the completions.
        writes_BE3: as `RolloutBatch.writes`.
        write_logp_BE: as `RolloutBatch.write_logp`.
        importance_BK: what a write of each step counts for in the loss.
        law: the distribution that tokens are scored under.
    """
    rows_R, steps_R = (importance_BK > 0).nonzero(as_tuple=True)
    step_RE, slot_RE, token_RE = writes_BE3[rows_R].unbind(dim=2)
    is_write_RE = step_RE >= 0
    slot_RE = slot_RE.clamp(min=0)
    # Writes are in the order of their steps: of those before this one, the last to a slot is what stands there.
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
        law=law,
        shown=token_RE.gather(1, (last_RL - 1).clamp(min=0)),
        targets=targets_RL,
        recorded=recorded_RL,
    )


def _of_text(batch: GroupedBatch, writes_BE3: Tensor) -> Tensor:
    """[B, E] bool: the writes to slots of the text, up to and including its first end of text."""
    return (writes_BE3[:, :, 0] >= 0) & (writes_BE3[:, :, 1] < batch.completion_lengths[:, None])
