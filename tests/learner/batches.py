"""Hand-written rollout batches for learner tests, with defaults for the remaining columns."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.batch import RolloutBatch


def batch_of(
    *, prompts: Tensor, completions: Tensor, lengths: Tensor, steps: Tensor, rewards: Tensor, **others: Tensor
) -> RolloutBatch:
    """Build a batch of groups of four, from prompts [B, P] and completions [B, L] without padding. Recorded
    log-probabilities and entropies are zero, and no token ends a text."""
    num_rows, num_slots = completions.shape
    zeros_BL = torch.zeros(num_rows, num_slots)
    columns = {
        "prompt_ids": prompts,
        "prompt_lengths": torch.full((num_rows,), prompts.shape[1]),
        "completion_ids": completions,
        "completion_lengths": lengths,
        "sample_keys": torch.arange(num_rows) * 7919,
        "rewards": rewards,
        "reward_parts": rewards[:, None],
        "correct": rewards > 0.5,
        "truncated": lengths == num_slots,
        "is_stop": torch.zeros(num_rows, num_slots, dtype=torch.bool),
        "group_ids": torch.arange(num_rows) // 4,
        "step_map": steps,
        "commit_logp": zeros_BL,
        "commit_entropy": zeros_BL,
        "commit_law_entropy": zeros_BL,
        "fallback": torch.zeros(num_rows, num_slots, dtype=torch.bool),
        "num_forwards": steps.amax(dim=1) + 1,
        "policy_versions": torch.zeros(num_rows, dtype=torch.long),
    }
    return RolloutBatch(**columns | others)
