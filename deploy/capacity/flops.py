"""FLOP and seconds of a run's phases, from the recipe alone: denoising completions, and training on them.

Every completion is assumed to fill its canvas, prompt included: an upper bound.

Seconds are FLOP over the share of peak FLOP/s that one GPU reached. The shares and the times per layer are fitted to
LLaDA-8B's shape on one H200 (docs/benchmarks.md, one GPU); `tests/deploy/capacity/test_measured.py` compares. Other
kinds of GPU are scaled by their peak FLOP/s.
"""

from __future__ import annotations

from actors.run_config import RunConfig
from actors.spec import sampler_facts
from deploy.capacity.gpus import GpuKind
from deploy.capacity.memory import published_bytes
from deploy.capacity.shape import num_adapters
from learner.batch import RolloutBatch
from learner.estimators import SamplerFacts
from learner.flops import CanvasSums, forward_flops, update_flops
from learner.model.config import TransformerConfig
from learner.planning.flops import full_group, planned_canvases, planned_flops
from learner.planning.sizes import ParameterCounts
from rollout.planned_steps import PlannedSteps, planned_steps
from rollout.request import SamplingParams

# An adapter of 1,342 MB: 1.02 s from the GPU to the host, 0.40 s for its checksums.
_PUBLISHED_BYTES_PER_S = 1.342e9 / 1.42
# Share of the peak FLOP/s, by whether the network is compiled.
_SAMPLING_SHARE, _LEARNING_SHARE = {False: 0.54, True: 0.63}, {False: 0.47, True: 0.54}
# An eager step waits for the host, which takes this long to launch the kernels of a layer. A step by CUDA graphs does
# not, but its small kernels take extra time per layer, most of all those that read a KV cache.
_LAUNCHES_OF_LAYER_S, _SMALL_OF_LAYER_S, _SMALL_OF_CACHED_LAYER_S = 0.6e-3, 0.1e-3, 0.3e-3


def sampling_flops(recipe: RunConfig, shape: TransformerConfig) -> float:
    """Count the FLOP of denoising a round's completions, averaged over the schedules."""
    total = sum(
        steps.num_steps * _step_flops(recipe, shape, params, steps)
        for params in recipe.rollout.params
        for steps in _steps_of(recipe, shape, params)
    )
    return recipe.sampled_groups_per_round * recipe.learner.group_size * total / len(recipe.rollout.params)


def learning_flops(recipe: RunConfig, shape: TransformerConfig, *, with_recompute: bool = False) -> float:
    """Count the FLOP of a round's updates, with old and reference likelihoods: those of one group, times the groups.

    `with_recompute`: whether to include what activation checkpointing recomputes.
    """
    learner, recomputes = recipe.learner, with_recompute and recipe.sharding.activation_checkpointing
    facts, group = _group(recipe, shape)
    return learner.groups_per_round * planned_flops(
        learner, shape, recipe.model.lora, facts, group, recomputes=recomputes
    )


def learning_canvases(recipe: RunConfig, shape: TransformerConfig) -> float:
    """Count the canvases of a completion in an inner update; see `planned_canvases`."""
    return planned_canvases(recipe.learner, shape, *_group(recipe, shape))


def _group(recipe: RunConfig, shape: TransformerConfig) -> tuple[SamplerFacts, RolloutBatch]:
    """Return a group that fills its canvases, and how it is sampled."""
    params = recipe.rollout.params[0]
    facts, num_steps = (
        sampler_facts(params, is_block_causal=shape.is_block_causal),
        sampler_facts(params).max_denoise_steps,
    )
    group = full_group(recipe.learner.group_size, recipe.rollout.max_prompt_tokens, params.gen_length, num_steps)
    return facts, group


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
    recomputes = recipe.sharding.activation_checkpointing
    return update_flops(shape, recipe.model.lora, sums, recomputes=recomputes)


def _steps_of(recipe: RunConfig, shape: TransformerConfig, params: SamplingParams) -> list[PlannedSteps]:
    num_steps, block_cache = sampler_facts(params).max_denoise_steps, recipe.rollout.engine.block_cache
    return planned_steps(params, shape, recipe.rollout.max_prompt_tokens, num_steps, block_cache=block_cache)


def _step_flops(recipe: RunConfig, shape: TransformerConfig, params: SamplingParams, steps: PlannedSteps) -> float:
    """Count the FLOP of one such step, which predicts a block; guidance computes it twice."""
    run, seen, block = steps.num_computed, steps.num_seen, params.block_length
    sums = CanvasSums(tokens=run, pairs=run * seen, queries=block, query_pairs=block * seen, scored=block)
    forward = forward_flops(shape, recipe.model.lora, sums)
    flops = forward.body + forward.head + num_adapters(recipe) * forward.adapter
    return 2 * flops if params.cfg_scale else flops


def completion_s(
    recipe: RunConfig, shape: TransformerConfig, kind: GpuKind, params: SamplingParams, num_rows: int
) -> float:
    """Estimate the seconds per completion when `num_rows` are denoised at a time."""
    seconds, layers, is_compiled = 0.0, shape.num_layers, recipe.rollout.engine.compiles_policy
    rate = _SAMPLING_SHARE[is_compiled] * kind.flop_per_s
    for steps in _steps_of(recipe, shape, params):
        computing_s = num_rows * _step_flops(recipe, shape, params, steps) / rate
        if is_compiled:
            of_layer_s = _SMALL_OF_CACHED_LAYER_S if steps.is_cached else _SMALL_OF_LAYER_S
            seconds += steps.num_steps * (computing_s + layers * of_layer_s)
        else:
            seconds += steps.num_steps * max(computing_s, layers * _LAUNCHES_OF_LAYER_S)
    return seconds / num_rows


def sampling_s(recipe: RunConfig, shape: TransformerConfig, kind: GpuKind, num_samplers: int) -> float:
    """Estimate the seconds of a round's completions on one GPU, in the work units of `num_samplers` samplers."""
    completions = recipe.sampled_groups_per_round * recipe.learner.group_size
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
    return _LEARNING_SHARE[recipe.sharding.compiles_blocks] * kind.flop_per_s
