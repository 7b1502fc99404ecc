from __future__ import annotations

import pytest
import torch

from learner.batch import RolloutBatch


@pytest.fixture
def rollouts() -> RolloutBatch:
    """Three groups of four completions: prompts of two lengths, completions that end early and that fill the canvas."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 38, (3, 6), generator=generator).repeat_interleave(4, dim=0)
    prompt_lengths = torch.tensor([6, 4, 6]).repeat_interleave(4)
    prompts[torch.arange(6) >= prompt_lengths[:, None]] = 39
    lengths = torch.randint(1, 9, (12,), generator=generator)
    completions = torch.randint(0, 38, (12, 8), generator=generator)
    completions[torch.arange(8) >= lengths[:, None] - 1] = 39
    return RolloutBatch(
        prompt_ids=prompts,
        prompt_lengths=prompt_lengths,
        completion_ids=completions,
        completion_lengths=lengths,
        sample_keys=torch.arange(12) * 7919,
        rewards=torch.rand(12, generator=generator),
        group_ids=torch.tensor([5, 6, 9]).repeat_interleave(4),
        step_map=torch.zeros(12, 8, dtype=torch.long),
        commit_logp=torch.zeros(12, 8),
        policy_versions=torch.zeros(12, dtype=torch.long),
    )
