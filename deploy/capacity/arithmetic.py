"""FLOP of a round, counted from the recipe alone: of denoising its completions, and of learning from them.

Every completion is taken to fill its canvas, prompt and all: the most that a round can be. Counted as the learner
counts (`learner/flops.py`); learning is planned by the method's own estimator on a group of such completions.

Shape letters: B completions, P prompt, L completion slots.
"""

from __future__ import annotations

import torch

from actors.run_config import RunConfig
from actors.spec import sampler_facts
from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import InnerUpdate, make_terms
from learner.flops import CanvasSums, forward_flops, update_flops
from learner.model.config import TransformerConfig
from learner.model.lora_config import WHOLE, LoraConfig
from learner.round import WEIGHING
from rollout.canvas import Canvas
from rollout.request import Cache, SamplingParams


def sampling_flops(recipe: RunConfig, shape: TransformerConfig) -> float:
    """FLOP of denoising a round's completions. A schedule that looks at probabilities commits one slot a step at worst,
    and is counted so; of several schedules the mean is taken."""
    params = recipe.rollout.params
    of = _block_causal_flops if shape.is_block_causal and recipe.rollout.engine.block_cache else _completion_flops
    each = [of(param, shape, recipe.rollout.max_prompt_tokens) for param in params]
    return recipe.learner.groups_per_round * recipe.learner.group_size * sum(each) / len(each)


def num_steps(params: SamplingParams) -> int:
    """Denoise steps of a completion, at most."""
    return sampler_facts(params).most_steps


def learning_flops(recipe: RunConfig, shape: TransformerConfig) -> float:
    """FLOP of a round's updates, with old and reference likelihoods: those of one group, times the groups."""
    learner, lora = recipe.learner, recipe.model.lora
    facts = sampler_facts(recipe.rollout.params[0], is_block_causal=shape.is_block_causal)
    batch = GroupedBatch.of(full_group(recipe))

    def canvases(update: InnerUpdate) -> CanvasSums:
        corruption = learner.estimator.corrupt(batch, update, facts)
        return CanvasSums.of(make_terms(batch, shape, corruption).views)

    updates = [InnerUpdate(index, learner.inner_updates) for index in range(learner.inner_updates)]
    keys = [learner.estimator.mask_key(update) for update in updates]
    of_key = {key: canvases(update) for key, update in reversed(list(zip(keys, updates, strict=True)))}
    total = sum(update_flops(shape, lora, of_key[key]) for key in keys)
    total += _without_gradient(learner, shape, lora, of_key, keys[0])
    if learner.objective.weighs_rows:
        weighed = canvases(InnerUpdate(WEIGHING, learner.inner_updates))
        total += forward_flops(shape, lora, weighed).total + forward_flops(shape, WHOLE, weighed).total
    return learner.groups_per_round * total


def _without_gradient(
    learner: LearnerConfig, shape: TransformerConfig, lora: LoraConfig, of_key: dict[int, CanvasSums], first: int
) -> float:
    """Old likelihoods, but those that the first step gives for free, and the reference's."""
    total, objective = 0.0, learner.objective
    if objective.needs_old:
        total += sum(forward_flops(shape, lora, canvases).total for key, canvases in of_key.items() if key != first)
        of_others = 1 - 1 / learner.num_minibatches
        total += of_others * forward_flops(shape, lora, of_key[first]).total
    if objective.needs_reference and not objective.weighs_rows:
        total += sum(forward_flops(shape, WHOLE, canvases).total for canvases in of_key.values())
    return total


def _completion_flops(params: SamplingParams, shape: TransformerConfig, prompt_tokens: int) -> float:
    length, block = prompt_tokens + params.gen_length, params.block_length
    steps, blocks = num_steps(params), params.num_blocks
    if params.cache is Cache.NONE:
        rows = 2 if params.cfg_scale else 1
        return rows * steps * _step_flops(shape, length, length, block)
    per_block = steps / blocks
    whole = blocks * (-(-per_block // params.cache_refresh_steps) if params.cache_refresh_steps else 1)
    total = whole * _step_flops(shape, length, length, block)
    for index in range(blocks):
        run = block if params.cache is Cache.DUAL else params.gen_length - index * block
        total += (per_block - whole / blocks) * _step_flops(shape, run, length, block)
    return total


def _block_causal_flops(params: SamplingParams, shape: TransformerConfig, prompt_tokens: int) -> float:
    """The same where finished blocks are remembered: each is run once more, along with the first step of the next."""
    block, total = params.block_length, 0.0
    canvas = Canvas(prompt_length=prompt_tokens, gen_length=params.gen_length, block_length=block, is_block_causal=True)
    begin, remembered = canvas.block_end(prompt_tokens) - block, 0
    while begin < canvas.end:
        seen = begin + block
        steps = _steps_for(params, seen - max(begin, prompt_tokens))
        total += _step_flops(shape, seen - remembered, seen, block)
        total += (steps - 1) * _step_flops(shape, block, seen, block)
        remembered, begin = begin, seen
    return total


def _steps_for(params: SamplingParams, num_slots: int) -> int:
    """Denoise steps of a block of which so many slots are masked: a step's share is that of a whole block. Steps that
    token editing adds depend on the policy, and are not counted."""
    if not (params.is_by_shares or params.steps_per_block):
        return num_slots
    share, num_larger = divmod(params.block_length, params.num_block_steps)
    steps = range(1, params.num_block_steps + 1)
    return next(count for count in steps if count * share + min(count, num_larger) >= num_slots)


def _step_flops(shape: TransformerConfig, run: int, seen: int, block: int) -> float:
    """FLOP of a denoise step that runs so many slots, each of which sees so many, and predicts a block."""
    sums = CanvasSums(tokens=run, pairs=run * seen, asked=block, asked_pairs=block * seen, scored=block)
    return forward_flops(shape, WHOLE, sums).total


def full_group(recipe: RunConfig) -> RolloutBatch:
    """A group whose completions fill their canvases, denoised from left to right in even shares."""
    rows, prompt, params = recipe.learner.group_size, recipe.rollout.max_prompt_tokens, recipe.rollout.params[0]
    length = params.gen_length
    slots = torch.arange(length).expand(rows, -1)
    zeros_BL, zeros_B = torch.zeros(rows, length), torch.zeros(rows)
    return RolloutBatch(
        # Any token but those that have a meaning.
        prompt_ids=torch.full((rows, prompt), 2),
        prompt_lengths=torch.full((rows,), prompt),
        completion_ids=torch.full((rows, length), 2),
        completion_lengths=torch.full((rows,), length),
        sample_keys=torch.arange(rows),
        rewards=zeros_B,
        reward_parts=zeros_B[:, None],
        correct=zeros_B.bool(),
        truncated=zeros_B.bool(),
        group_ids=torch.zeros(rows, dtype=torch.int64),
        step_map=slots * num_steps(params) // length,
        commit_logp=zeros_BL,
        commit_entropy=zeros_BL,
        commit_law_entropy=zeros_BL,
        fallback=zeros_BL.bool(),
        num_forwards=torch.full((rows,), num_steps(params)),
        policy_versions=torch.zeros(rows, dtype=torch.int64),
    )
