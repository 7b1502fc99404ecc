"""FLOP and seconds of a run's phases, from the recipe alone: denoising completions, and training on them.

Every completion is assumed to fill its canvas, prompt included: an upper bound. FLOP are counted as in
`learner/flops.py`; training is planned by the method's own estimator on a group of such completions.

Seconds are FLOP over the share of peak FLOP/s that one GPU reached. The shares and the times per layer are fitted to
LLaDA-8B's shape on one H200 (docs/benchmarks.md, one GPU); `tests/deploy/capacity/test_measured.py` compares. Other
kinds of GPU are scaled by their peak FLOP/s.

Shape letters: B completions, L completion slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actors.run_config import RunConfig
from actors.spec import sampler_facts
from deploy.capacity.gpus import GpuKind
from deploy.capacity.memory import published_bytes
from deploy.capacity.shape import num_adapters
from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import InnerUpdate, Terms, make_terms
from learner.flops import CanvasSums, forward_flops, update_flops
from learner.model.config import TransformerConfig
from learner.model.lora_config import FULL_FINE_TUNING, LoraConfig
from learner.model.sizes import ParameterCounts
from learner.parallel.teacher import completed_texts
from learner.round import WEIGHING
from rollout.canvas import Canvas
from rollout.request import Cache, SamplingParams

# An adapter of 1,342 MB: 1.02 s from the GPU to the host, 0.40 s for its checksums.
_PUBLISHED_BYTES_PER_S = 1.342e9 / 1.42
# Share of the peak FLOP/s, by whether the network is compiled.
_SAMPLING_SHARE, _LEARNING_SHARE = {False: 0.54, True: 0.63}, {False: 0.47, True: 0.54}
# An eager step waits for the host, which takes this long to launch the kernels of a layer. A step by CUDA graphs does
# not, but its small kernels take extra time per layer, most of all those that read a KV cache.
_LAUNCHES_OF_LAYER_S, _SMALL_OF_LAYER_S, _SMALL_OF_CACHED_LAYER_S = 0.6e-3, 0.1e-3, 0.3e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Denoise steps of a completion that cost the same."""

    count: float
    """Their number, at most."""
    flops: float
    """FLOP of each step, per completion."""
    is_cached: bool
    """Whether they compute a few slots, and read the others from the KV cache."""


def sampling_flops(recipe: RunConfig, shape: TransformerConfig) -> float:
    """Count the FLOP of denoising a round's completions, averaged over the schedules."""
    each = [steps.count * steps.flops for params in recipe.rollout.params for steps in steps_of(recipe, shape, params)]
    return recipe.learner.groups_per_round * recipe.learner.group_size * sum(each) / len(recipe.rollout.params)


def steps_of(recipe: RunConfig, shape: TransformerConfig, params: SamplingParams) -> list[Steps]:
    """Return the denoise steps of a completion.

    A schedule that depends on probabilities is counted at its worst: one committed slot per step.
    """
    if shape.is_block_causal and recipe.rollout.engine.block_cache:
        return _block_causal_steps(recipe, shape, params)
    return _completion_steps(recipe, shape, params)


def learning_flops(recipe: RunConfig, shape: TransformerConfig, *, with_recompute: bool = False) -> float:
    """Count the FLOP of a round's updates, with old and reference likelihoods: those of one group, times the groups.

    `with_recompute`: whether to include what activation checkpointing recomputes.
    """
    learner, lora = recipe.learner, recipe.model.lora
    facts = sampler_facts(recipe.rollout.params[0], is_block_causal=shape.is_block_causal)
    batch = GroupedBatch.of(full_group(recipe))

    def terms(update: InnerUpdate) -> Terms:
        return make_terms(batch, shape, learner.estimator.corrupt(batch, update, facts))

    def canvases(update: InnerUpdate) -> CanvasSums:
        return CanvasSums.of(terms(update).views)

    updates = [InnerUpdate(index, learner.inner_updates) for index in range(learner.inner_updates)]
    keys = [learner.estimator.mask_key(update) for update in updates]
    of_key = {key: canvases(update) for key, update in reversed(list(zip(keys, updates, strict=True)))}
    recomputes = with_recompute and recipe.sharding.activation_checkpointing
    total = sum(_update_flops(shape, lora, of_key[key], recomputes=recomputes) for key in keys)
    total += _without_gradient(learner, shape, lora, of_key, keys[0])
    if learner.objective.needs_teacher:
        # The teacher is taken to have the policy's shape. In each update it scores each completion once, without masks.
        texts = (completed_texts(terms(update), batch, shape.pad_token_id) for update in updates)
        total += sum(forward_flops(shape, FULL_FINE_TUNING, CanvasSums.of(views)).total for views in texts)
    if learner.objective.precomputes_row_weights:
        weighed = canvases(InnerUpdate(WEIGHING, learner.inner_updates))
        total += forward_flops(shape, lora, weighed).total + forward_flops(shape, FULL_FINE_TUNING, weighed).total
    return learner.groups_per_round * total


def sft_flops(recipe: RunConfig, shape: TransformerConfig, num_documents: int) -> float:
    """Count the FLOP of an SFT update on documents of maximum length, with half of their trained tokens masked."""
    length = recipe.sft_tokens
    trained = length if recipe.sft.data is not None else recipe.rollout.sampling.gen_length
    asked = num_documents * trained // 2
    sums = CanvasSums(
        tokens=num_documents * length,
        pairs=num_documents * length**2,
        queries=asked,
        query_pairs=asked * length,
        scored=asked,
    )
    return _update_flops(shape, recipe.model.lora, sums, recomputes=recipe.sharding.activation_checkpointing)


def _update_flops(shape: TransformerConfig, lora: LoraConfig, canvases: CanvasSums, *, recomputes: bool) -> float:
    """Count the FLOP of a forward and a backward pass; `recomputes` adds the recomputed forward pass of the blocks."""
    forward = forward_flops(shape, lora, canvases)
    return update_flops(shape, lora, canvases) + recomputes * (forward.body + forward.adapter)


def _without_gradient(
    learner: LearnerConfig, shape: TransformerConfig, lora: LoraConfig, of_key: dict[int, CanvasSums], first: int
) -> float:
    """Count the FLOP of old likelihoods, except those that the first step gives for free, and of the reference's."""
    total, objective = 0.0, learner.objective
    if objective.needs_old:
        total += sum(forward_flops(shape, lora, canvases).total for key, canvases in of_key.items() if key != first)
        of_others = 1 - 1 / learner.num_minibatches
        total += of_others * forward_flops(shape, lora, of_key[first]).total
    if objective.needs_reference and not objective.precomputes_row_weights:
        total += sum(forward_flops(shape, FULL_FINE_TUNING, canvases).total for canvases in of_key.values())
    return total


def _completion_steps(recipe: RunConfig, shape: TransformerConfig, params: SamplingParams) -> list[Steps]:
    length, block = recipe.rollout.max_prompt_tokens + params.gen_length, params.block_length
    steps, blocks = sampler_facts(params).max_denoise_steps, params.num_blocks
    rows = 2 if params.cfg_scale else 1
    whole = rows * _step_flops(recipe, shape, length, length, block)
    if params.cache is Cache.NONE:
        return [Steps(count=steps, flops=whole, is_cached=False)]
    per_block = steps / blocks
    num_whole = -(-per_block // params.cache_refresh_steps) if params.cache_refresh_steps else 1
    runs = [block if params.cache is Cache.DUAL else params.gen_length - index * block for index in range(blocks)]
    cached = [
        Steps(count=per_block - num_whole, flops=rows * _step_flops(recipe, shape, run, length, block), is_cached=True)
        for run in runs
    ]
    return [Steps(count=blocks * num_whole, flops=whole, is_cached=False), *cached]


def _block_causal_steps(recipe: RunConfig, shape: TransformerConfig, params: SamplingParams) -> list[Steps]:
    """Return the steps with a KV cache of finished blocks: the first step of a block recomputes the previous block."""
    block, prompt_tokens, found = params.block_length, recipe.rollout.max_prompt_tokens, []
    canvas = Canvas(prompt_length=prompt_tokens, gen_length=params.gen_length, block_length=block, is_block_causal=True)
    begin, num_cached = canvas.block_end(prompt_tokens) - block, 0
    while begin < canvas.end:
        seen = begin + block
        steps = _steps_for(params, seen - max(begin, prompt_tokens))
        first, later = (
            _step_flops(recipe, shape, seen - num_cached, seen, block),
            # A policy that predicts the next slot also runs the one before the block.
            _step_flops(recipe, shape, block + shape.predicts_next * (begin > 0), seen, block),
        )
        found += [Steps(count=1, flops=first, is_cached=True), Steps(count=steps - 1, flops=later, is_cached=True)]
        num_cached, begin = begin, seen
    return found


def _steps_for(params: SamplingParams, num_slots: int) -> int:
    """Return the denoise steps of a block with `num_slots` masked slots; each step commits the share of a full block.

    Steps that token editing adds depend on the policy, and are not counted.
    """
    if not (params.has_even_shares or params.steps_per_block):
        return num_slots
    share, num_larger = divmod(params.block_length, params.num_block_steps)
    steps = range(1, params.num_block_steps + 1)
    return next(count for count in steps if count * share + min(count, num_larger) >= num_slots)


def _step_flops(recipe: RunConfig, shape: TransformerConfig, run: int, seen: int, block: int) -> float:
    """Count the FLOP of a denoise step that computes `run` slots, each attending to `seen`, and predicts a block."""
    sums = CanvasSums(tokens=run, pairs=run * seen, queries=block, query_pairs=block * seen, scored=block)
    forward = forward_flops(shape, recipe.model.lora, sums)
    return forward.body + forward.head + num_adapters(recipe) * forward.adapter


def full_group(recipe: RunConfig) -> RolloutBatch:
    """Build a group whose completions fill their canvases, denoised from left to right in even shares.

    Their tokens differ, because equal canvases would be counted once.
    """
    rows, prompt, params = recipe.learner.group_size, recipe.rollout.max_prompt_tokens, recipe.rollout.params[0]
    length, num_steps = params.gen_length, sampler_facts(params).max_denoise_steps
    slots = torch.arange(length).expand(rows, -1)
    zeros_BL, zeros_B = torch.zeros(rows, length), torch.zeros(rows)
    return RolloutBatch(
        # Any tokens that are not special.
        prompt_ids=torch.full((rows, prompt), 2),
        prompt_lengths=torch.full((rows,), prompt),
        completion_ids=2 + torch.arange(rows)[:, None].expand(-1, length),
        completion_lengths=torch.full((rows,), length),
        sample_keys=torch.arange(rows),
        rewards=zeros_B,
        reward_parts=zeros_B[:, None],
        correct=zeros_B.bool(),
        truncated=zeros_B.bool(),
        group_ids=torch.zeros(rows, dtype=torch.int64),
        step_map=slots * num_steps // length,
        commit_logp=zeros_BL,
        commit_entropy=zeros_BL,
        commit_law_entropy=zeros_BL,
        fallback=zeros_BL.bool(),
        num_forwards=torch.full((rows,), num_steps),
        policy_versions=torch.zeros(rows, dtype=torch.int64),
    )


def completion_s(
    recipe: RunConfig, shape: TransformerConfig, kind: GpuKind, params: SamplingParams, num_rows: int
) -> float:
    """Estimate the seconds per completion when `num_rows` are denoised at a time."""
    seconds, layers, is_compiled = 0.0, shape.num_layers, recipe.rollout.engine.compile
    rate = _SAMPLING_SHARE[is_compiled] * kind.flop_per_s
    for steps in steps_of(recipe, shape, params):
        computing_s = num_rows * steps.flops / rate
        if is_compiled:
            of_layer_s = _SMALL_OF_CACHED_LAYER_S if steps.is_cached else _SMALL_OF_LAYER_S
            seconds += steps.count * (computing_s + layers * of_layer_s)
        else:
            seconds += steps.count * max(computing_s, layers * _LAUNCHES_OF_LAYER_S)
    return seconds / num_rows


def sampling_s(recipe: RunConfig, shape: TransformerConfig, kind: GpuKind, num_samplers: int) -> float:
    """Estimate the seconds of a round's completions on one GPU, in the work units of `num_samplers` samplers."""
    completions = recipe.learner.groups_per_round * recipe.learner.group_size
    work_unit = recipe.groups_per_work_unit_for(num_samplers) * recipe.learner.group_size
    num_rows = min(recipe.rollout.engine.num_slots, work_unit)
    each = [completion_s(recipe, shape, kind, params, num_rows) for params in recipe.rollout.params]
    return completions * sum(each) / len(each)


def learning_s(recipe: RunConfig, shape: TransformerConfig, kind: GpuKind) -> float:
    """Estimate the seconds of a round's updates on one GPU."""
    return learning_flops(recipe, shape, with_recompute=True) / _learning_rate(recipe, kind)


def sft_step_s(recipe: RunConfig, shape: TransformerConfig, kind: GpuKind, num_workers: int) -> float:
    """Estimate the seconds of an optimizer step of SFT, on documents of maximum length."""
    of_worker = -(-recipe.sft.batch_size // num_workers)
    return sft_flops(recipe, shape, of_worker) / _learning_rate(recipe, kind)


def evaluation_s(recipe: RunConfig, shape: TransformerConfig, kind: GpuKind, num_samplers: int) -> float:
    """Estimate the seconds of an evaluation such as those between the rounds, at the first of its schedules only."""
    _, _, num_problems = recipe.evaluation.selection_problems
    work_unit = min(recipe.rollout.batch_size, num_problems)
    num_work_units = -(-num_problems // work_unit)
    of_busiest = min(num_problems, -(-num_work_units // num_samplers) * work_unit)
    num_rows = min(recipe.rollout.engine.num_slots, work_unit)
    return of_busiest * completion_s(recipe, shape, kind, recipe.evaluated_params[0], num_rows)


def publishing_s(recipe: RunConfig, shape: TransformerConfig) -> float | None:
    """Estimate the seconds from the learner's GPU to the weight store; None for full weights, not measured."""
    lora = recipe.model.lora
    return published_bytes(recipe, ParameterCounts.of(shape, lora)) / _PUBLISHED_BYTES_PER_S if lora.rank else None


def _learning_rate(recipe: RunConfig, kind: GpuKind) -> float:
    return _LEARNING_SHARE[recipe.sharding.compile] * kind.flop_per_s
