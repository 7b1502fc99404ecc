"""Synthetic rounds of random completions, and the learners (ours, the reference) that train on them.

Shape letters: U inner updates, B rows, P prompt, L completion slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import Shape, make_policy
from benchmarks.reference_update import ReferenceUpdate, UpdateSettings
from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import InnerUpdate, SamplerFacts, Terms, make_terms
from learner.learner import Learner
from learner.model.config import TransformerConfig
from learner.parallel.sharding import ShardedPolicy

BLOCK_LENGTH, TOKENS_PER_STEP = 32, 2
# Log-normal fit to the question lengths of GSM8K's training set, counted in words, digits and signs:
# percentiles 5, 50 and 95 are 29, 51 and 93.
_QUESTION = NormalDist(mu=3.93, sigma=0.365)
# Tokens of a prompt besides its question: the task's instruction and the chat template.
_INSTRUCTION_TOKENS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Shape of a network and of a round for it."""

    shape: Shape
    prompt_tokens: int = 64
    gen_length: int = 128
    num_groups: int = 1
    group_size: int = 6
    num_updates: int = 12
    p_mask_prompt: float = 0.15
    device: str = "cpu"

    @property
    def canvas_tokens(self) -> int:
        """Slots of one canvas, S."""
        return self.prompt_tokens + self.gen_length

    @property
    def num_rows(self) -> int:
        """Completions of a round, B."""
        return self.num_groups * self.group_size


def make_round(setting: Setting) -> RolloutBatch:
    """Make random prompts and completions on the CPU. Texts fill a quarter to all of the slots, evenly spread."""
    generator, B, L = torch.Generator().manual_seed(1), setting.num_rows, setting.gen_length
    prompts = torch.randint(
        2, setting.shape.vocab_size, (setting.num_groups, setting.prompt_tokens), generator=generator
    )
    completions = torch.randint(2, setting.shape.vocab_size, (B, L), generator=generator)
    lengths = torch.linspace(L / 4, L, B).long()[torch.randperm(B, generator=generator)]
    completions[torch.arange(L) >= lengths[:, None] - 1] = 1
    order = torch.rand(B, -(-L // BLOCK_LENGTH), BLOCK_LENGTH, generator=generator).argsort(dim=2).argsort(dim=2)
    steps = order // TOKENS_PER_STEP + BLOCK_LENGTH // TOKENS_PER_STEP * torch.arange(order.shape[1])[:, None]
    num_steps = int(steps.max()) + 1
    rewards = torch.rand(B, generator=generator)
    zeros = torch.zeros(B, L)
    return RolloutBatch(
        prompt_ids=prompts.repeat_interleave(setting.group_size, dim=0),
        prompt_lengths=torch.full((B,), setting.prompt_tokens),
        completion_ids=completions,
        completion_lengths=lengths,
        sample_keys=torch.arange(B) * 7919,
        rewards=rewards,
        reward_parts=rewards[:, None],
        correct=rewards > 0.5,
        truncated=lengths == L,
        is_stop=completions == 1,
        group_ids=torch.arange(setting.num_groups).repeat_interleave(setting.group_size),
        step_map=steps.flatten(1)[:, :L],
        commit_logp=zeros,
        commit_entropy=zeros,
        commit_law_entropy=zeros,
        fallback=zeros > 0,
        num_forwards=torch.ones(B, dtype=torch.int64),
        policy_versions=torch.zeros(B, dtype=torch.int64),
        step_rewards=torch.rand(B, num_steps, generator=generator),
        step_answers=torch.full((), 2, dtype=torch.int32).expand(B, num_steps, L),
        # Pairs share the first half of a tree; a node's canvas is that of the first of them.
        node_keys=torch.stack((B + torch.arange(B) // 2, torch.arange(B)), dim=1),
    )


def ragged_round(setting: Setting) -> RolloutBatch:
    """Make a round with GSM8K's distribution of prompt lengths. Prompts of a group have equal length."""
    places = torch.randperm(setting.num_groups, generator=torch.Generator().manual_seed(2))
    spread = [exp(_QUESTION.inv_cdf((place + 0.5) / setting.num_groups)) for place in places.tolist()]
    lengths = torch.tensor([_INSTRUCTION_TOKENS + round(question) for question in spread])
    longest = replace(setting, prompt_tokens=int(lengths.max()))
    return replace(make_round(longest), prompt_lengths=lengths.repeat_interleave(setting.group_size))


def learner_config(setting: Setting) -> LearnerConfig:
    """Make a config with the first d1's settings, its loss normalisation, and one group as micro-batch."""
    return LearnerConfig.model_validate(
        {
            **_of_round(setting),
            "inner_updates": setting.num_updates,
            "estimator": {"name": "one_step", "p_mask_prompt": setting.p_mask_prompt, "prompt_mask": "each_update"},
            "objective": {"name": "clipped_ratio", "normalize_by": "group"},
        }
    )


def method_config(setting: Setting, algorithm: str) -> LearnerConfig:
    """Make a config for a row of the table of algorithms, with its own number of updates."""
    return LearnerConfig.model_validate({**_of_round(setting), "algorithm": algorithm})


def _of_round(setting: Setting) -> dict[str, Any]:
    return {
        "num_rounds": 1,
        "group_size": setting.group_size,
        "groups_per_round": setting.num_groups,
        "micro_batch_tokens": setting.group_size * setting.canvas_tokens,
    }


def ragged_terms(setting: Setting, config: TransformerConfig) -> Terms:
    """Make the terms of the first inner update of a ragged round, with prompt masks."""
    batch = GroupedBatch.of(ragged_round(setting))
    corruption = learner_config(setting).estimator.corrupt(batch, InnerUpdate(0, 1), SamplerFacts())
    return make_terms(batch, config, corruption)


def make_learner(setting: Setting, dtype: torch.dtype = torch.float32) -> Learner:
    """Make our learner for the setting's random policy."""
    model = make_policy(setting.shape, setting.canvas_tokens, setting.device).to(dtype)
    # The completions are random, so there is no sampler whose log-probabilities could be compared.
    return Learner(ShardedPolicy(model, None), learner_config(setting), SamplerFacts(has_reproducible_logps=False))


def make_reference(setting: Setting, *, is_stacked: bool = False) -> ReferenceUpdate:
    """Make the reference implementation of d1's update for the same policy."""
    model = make_policy(setting.shape, setting.canvas_tokens, setting.device)
    return ReferenceUpdate(model, UpdateSettings(is_stacked=is_stacked))


def prompt_masks(setting: Setting, batch: RolloutBatch) -> Tensor:
    """Return our estimator's prompt masks, [U, B, P] bool, for use by the reference."""
    grouped, estimator = GroupedBatch.of(batch), learner_config(setting).estimator
    masks = []
    for index in range(setting.num_updates):
        corruption = estimator.corrupt(grouped, InnerUpdate(index, setting.num_updates), SamplerFacts())
        masked_BP = corruption.prompt_masked
        masks.append(torch.zeros_like(batch.prompt_ids, dtype=torch.bool) if masked_BP is None else masked_BP)
    return torch.stack(masks)
