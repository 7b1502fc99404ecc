from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from learner.batch import GroupedBatch, RolloutBatch
from tests.learner.captured_graphs import compile_by_capture, graphs

BLOCK_LENGTH = 4


@pytest.fixture
def rollouts() -> RolloutBatch:
    """Three groups of four completions: prompts of two lengths, completions that end early and that fill the canvas.

    Denoised in blocks of 4, two slots a step, as far as the block with the end of text.
    """
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 38, (3, 6), generator=generator).repeat_interleave(4, dim=0)
    prompt_lengths = torch.tensor([6, 4, 6]).repeat_interleave(4)
    prompts[torch.arange(6) >= prompt_lengths[:, None]] = 39
    lengths = torch.randint(1, 9, (12,), generator=generator)
    completions = torch.randint(0, 38, (12, 8), generator=generator)
    completions[torch.arange(8) >= lengths[:, None] - 1] = 39
    rewards = torch.rand(12, generator=generator)
    noise = torch.rand(12, 2, BLOCK_LENGTH, generator=generator)
    steps = noise.argsort(dim=2).argsort(dim=2) // 2 + 2 * torch.arange(2)[:, None]
    is_denoised = torch.arange(8) < -(-lengths[:, None] // BLOCK_LENGTH) * BLOCK_LENGTH
    return RolloutBatch(
        prompt_ids=prompts,
        prompt_lengths=prompt_lengths,
        completion_ids=completions,
        completion_lengths=lengths,
        sample_keys=torch.arange(12) * 7919,
        rewards=rewards,
        reward_parts=torch.stack((rewards / 3, rewards * 2 / 3), dim=1),
        correct=rewards > 0.7,
        truncated=lengths == 8,
        is_stop=completions == 39,
        group_ids=torch.tensor([5, 6, 9]).repeat_interleave(4),
        step_map=torch.where(is_denoised, steps.flatten(1), -1),
        commit_logp=torch.where(is_denoised, -torch.rand(12, 8, generator=generator), 0.0),
        commit_entropy=torch.where(is_denoised, torch.rand(12, 8, generator=generator), 0.0),
        fallback=is_denoised & (torch.rand(12, 8, generator=generator) < 0.4),
        commit_law_entropy=torch.where(is_denoised, torch.rand(12, 8, generator=generator), 0.0),
        num_forwards=torch.full((12,), 4),
        policy_versions=torch.zeros(12, dtype=torch.long),
        step_rewards=torch.rand(12, 4, generator=generator),
        step_answers=torch.randint(0, 38, (12, 4, 8), generator=generator, dtype=torch.int32),
        # Three nodes in the first group, two in the others. A node's canvas is that of its first leaf.
        node_keys=torch.stack((torch.tensor([0, 0, 1, 2, 3, 3, 3, 4, 5, 5, 6, 6]) + 100, torch.arange(12)), dim=1),
    )


@pytest.fixture
def grouped(rollouts: RolloutBatch) -> GroupedBatch:
    """The same batch with group indices of its rows."""
    return GroupedBatch.of(rollouts)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs of the test, counted in torch.compile's backend."""
    monkeypatch.setattr(torch, "compile", compile_by_capture)
    torch._dynamo.reset()
    graphs.clear()
    yield graphs
    torch._dynamo.reset()
