"""Memory of samplers, engines and learner workers, derived from the recipe part by part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from actors.resources import OBJECT_STORE
from actors.run_config import RunConfig
from deploy.capacity.shape import begins_merged, num_adapters
from learner.model.config import TransformerConfig
from learner.planning.sizes import FLOAT32, ParameterCounts, bytes_of, forward_bytes, kept_bytes, logits_bytes
from rollout.request import Cache

# Assumed, not measured: CUDA's context with its libraries, and NCCL's buffers with several GPUs.
_CONTEXT_BYTES, _NCCL_BYTES = 10**9, 10**9
_MOMENTS = 2
# NF4: half a byte, and a float32 scale for each 64 weights.
_NF4_BYTES = 0.5 + 4 / 64
# FSDP gathers the next block while one computes.
_GATHERED_BLOCKS = 2
_MORE_WORKERS = "more learner.num_workers"
_FEWER_TRAINED = f"{_MORE_WORKERS} or LoRA (model.lora.rank)"


class Part(NamedTuple):
    """One part of the memory of a process."""

    name: str
    """Display name."""
    num_bytes: float
    """Its size."""
    helps: str = ""
    """Fields of the recipe that would make it smaller; empty if there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMemory:
    """GPU memory of one process."""

    label: str
    """Display name, such as `a sampler`."""
    kind: str
    """The field of `gpus` that sets its share of a GPU, such as `sampler`."""
    share: float
    """That share."""
    parts: tuple[Part, ...]
    """Its parts, the largest first."""

    @property
    def num_bytes(self) -> float:
        """Total memory."""
        return sum(part.num_bytes for part in self.parts)


def largest(parts: tuple[Part, ...]) -> Part:
    """Return the largest part that a field of the recipe can make smaller."""
    return max((part for part in parts if part.helps), key=lambda part: part.num_bytes)


def why_too_large(process: ProcessMemory, gpu_bytes: float, where: str) -> str | None:
    """Explain why a process does not fit its share of a GPU, with what helps; None if it fits."""
    available = process.share * gpu_bytes
    if process.num_bytes <= available:
        return None
    share, more = ("", "") if process.share == 1 else (f"{process.share:g} of ", f", or a larger gpus.{process.kind}")
    most = largest(process.parts)
    return (
        f"{process.label} takes at least {process.num_bytes / 1e9:.1f} GB of GPU memory ({most.name} "
        f"{most.num_bytes / 1e9:.1f}), and {share}{where} has {available / 1e9:.1f}; take {most.helps}{more}"
    )


def sampler_memory(recipe: RunConfig, shape: TransformerConfig) -> ProcessMemory:
    """Derive the memory of a sampler: one policy, and a forward of its slots, or of its largest work unit if less."""
    parts = _sampling_parts(recipe, shape, 1, min(recipe.rollout.engine.num_slots, recipe.max_requests_per_work_unit))
    if recipe.gpus.colocate:
        parts.append(Part("CUDA and NCCL of an offloaded learner", _CONTEXT_BYTES + _NCCL_BYTES))
    return _process("a sampler", "sampler", recipe, parts)


def engine_memory(recipe: RunConfig, shape: TransformerConfig, most_live: int) -> ProcessMemory:
    """Derive the memory of a service engine with up to `most_live` versions, of which one computes at a time."""
    parts = _sampling_parts(recipe, shape, most_live, recipe.rollout.engine.num_slots)
    return _process("an engine", "engine", recipe, parts)


def learner_memory(recipe: RunConfig, shape: TransformerConfig, num_workers: int) -> ProcessMemory:
    """Derive the GPU memory of one of `num_workers` learner workers, in the stage that takes most.

    Fewer workers may share one copy of the policy (`sharding.workers_per_copy`).
    """
    stages = (
        _process(stage.label, "learner", recipe, _learner_parts(recipe, shape, num_workers, stage))
        for stage in _stages(recipe, num_workers)
    )
    return max(stages, key=lambda process: process.num_bytes)


def main_memory_of_learner(recipe: RunConfig, shape: TransformerConfig) -> float:
    """Derive the main memory of weights and optimizer moments, over all learner workers.

    On CPUs and with `cpu_offload` these are all of them, and the gradient. With colocated samplers they are what is
    offloaded; otherwise there are none.
    """
    counts, num_workers = ParameterCounts.of(shape, recipe.model.lora), recipe.learner.num_workers
    is_offloaded = recipe.device == "cuda" and not recipe.sharding.cpu_offload
    if is_offloaded and not recipe.gpus.colocate:
        return 0.0
    of_copy = _workers_per_copy(recipe, num_workers)
    # Colocated learners are never offloaded between a backward pass and its step, so their gradient is not.
    state = FLOAT32 * (_MOMENTS + (not is_offloaded)) * counts.trained / of_copy
    if recipe.device == "cpu" and recipe.sharding.sums_locally(counts.trained, recipe.model.lora, num_workers):
        state += FLOAT32 * counts.trained
    held = (_weights(recipe, counts, of_copy, stage) for stage in _stages(recipe, num_workers))
    return num_workers * (state + max(sum(part.num_bytes for part in parts) for parts in held))


def sampler_weight_bytes(recipe: RunConfig, counts: ParameterCounts) -> float:
    """Return the bytes of one policy in a sampler, with its adapters."""
    return bytes_of(recipe.rollout.engine.dtype) * (counts.policy + num_adapters(recipe) * counts.adapter)


def versions_at_a_time(recipe: RunConfig) -> int:
    """Return the number of policy versions held for the samplers: those in the weight store, and one that arrives."""
    return recipe.learner.max_staleness + 3


def published_bytes(recipe: RunConfig, counts: ParameterCounts) -> float:
    """Return the bytes of a published version: an adapter in float32, or full weights in the samplers' precision."""
    if recipe.model.lora.rank:
        return FLOAT32 * counts.adapter
    return bytes_of(recipe.rollout.engine.dtype) * counts.policy


def _process(label: str, kind: str, recipe: RunConfig, parts: Iterable[Part]) -> ProcessMemory:
    largest_first = sorted(parts, key=lambda part: -part.num_bytes)
    return ProcessMemory(label=label, kind=kind, share=getattr(recipe.gpus, kind), parts=tuple(largest_first))


def _sampling_parts(recipe: RunConfig, shape: TransformerConfig, num_versions: int, most_rows: int) -> list[Part]:
    lora, engine, params = recipe.model.lora, recipe.rollout.engine, recipe.rollout.params
    counts, each = ParameterCounts.of(shape, lora), bytes_of(engine.dtype)
    slots_help = "a smaller rollout.engine.num_slots"
    rows = most_rows * (2 if any(param.cfg_scale for param in params) else 1)
    # In the policy's precision; in float32 shifted, and exponentiated.
    logits = rows * params[0].block_length * shape.vocab_size * (each + 2 * FLOAT32)
    dtype_helps = "rollout.engine.dtype=bfloat16" if engine.dtype == "float32" else "a smaller model"
    parts = [
        Part("weights", each * counts.policy, dtype_helps),
        Part("activations", forward_bytes(shape, rows * recipe.canvas_tokens, each), slots_help),
        Part("logits of the blocks", logits, f"{slots_help} or rollout.sampling.block_length"),
        Part("CUDA", _CONTEXT_BYTES),
    ]
    if recipe.learner.num_step_answers(params[0].gen_length):
        parts.append(Part("logits of step answers", rows * params[0].gen_length * shape.vocab_size * each, slots_help))
    if engine.fp8:
        layers = (shape.linear_layers(layer).values() for layer in range(shape.num_layers))
        num_weights = sum(inputs * outputs for of_layer in layers for inputs, outputs in of_layer)
        # Versions of an adapter share their base.
        parts.append(Part("FP8 weights", (1 if lora.rank else num_versions) * num_weights, "rollout.engine.fp8=false"))
    if lora.rank:
        # Versions share their base, and SFT's adapter.
        adapters = each * (num_versions - 1 + num_adapters(recipe)) * counts.adapter
        parts.append(Part("adapters", adapters, "a smaller model.lora.rank"))
    elif num_versions > 1:
        others = each * (num_versions - 1) * counts.policy
        parts.append(Part("other versions", others, "a smaller service.max_live_versions"))
    if (shape.is_block_causal and engine.block_cache) or any(param.cache is not Cache.NONE for param in params):
        keys = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        cached = engine.num_slots * (recipe.canvas_tokens + 1) * keys * each
        parts.append(Part("cache of keys and values", cached, slots_help))
    return parts


class _Stage(NamedTuple):
    """What differs from stage to stage."""

    label: str
    """Display name of the learner in this stage."""
    tokens: int
    """Maximum number of tokens of a forward pass."""
    helps: str
    """The field that reduces them."""
    has_sft_adapter: bool = False
    """Whether SFT's adapter is held in addition to the base."""
    has_reference: bool = False
    """Whether a copy of the policy is held as the reference."""
    has_teacher: bool = False
    """Whether a teacher is held, which is assumed to be as large as the policy."""
    has_value: bool = False
    """Whether a value model is held and trained."""


def _stages(recipe: RunConfig, num_workers: int) -> Iterator[_Stage]:
    """Yield the stages of the run: SFT, the rounds, and the control, which is SFT again."""
    lora, learner, canvas = recipe.model.lora, recipe.learner, recipe.canvas_tokens
    has_sft = recipe.sft.num_steps > 0
    after_sft = has_sft and lora.rank > 0
    of_sft = recipe.sft_micro_batch_tokens_for(num_workers)
    shorter_canvas = "a smaller rollout.max_prompt_tokens or rollout.sampling.gen_length"
    shorter = "a smaller sft.max_tokens" if recipe.sft.max_tokens else shorter_canvas
    sft_helps = "a smaller sft.micro_batch_tokens" if of_sft > recipe.sft_tokens else shorter
    if has_sft:
        yield _Stage("a learner worker in SFT", of_sft, sft_helps)
    if learner.num_rounds or not has_sft:
        is_longer = learner.micro_batch_tokens > canvas
        yield _Stage(
            "a learner worker",
            max(learner.micro_batch_tokens, canvas),
            "a smaller learner.micro_batch_tokens" if is_longer else shorter_canvas,
            has_sft_adapter=after_sft,
            has_reference=learner.objective.needs_reference and not lora.rank,
            has_teacher=learner.objective.needs_teacher,
            has_value=learner.value is not None,
        )
    if recipe.control.enabled:
        yield _Stage("a learner worker in the control", of_sft, sft_helps, has_sft_adapter=after_sft)


def _learner_parts(recipe: RunConfig, shape: TransformerConfig, num_workers: int, stage: _Stage) -> Iterator[Part]:
    lora, sharding = recipe.model.lora, recipe.sharding
    counts, each = ParameterCounts.of(shape, lora), bytes_of(sharding.compute_dtype)
    of_copy = _workers_per_copy(recipe, num_workers)
    # Gathered blocks, or with NF4 one dequantized layer. For trained blocks also their gradient, before it is reduced
    # over the workers.
    at_a_time = counts.layer if lora.base_weights == "nf4" else _GATHERED_BLOCKS * counts.block
    blocks = at_a_time + _GATHERED_BLOCKS * counts.adapter_of_block + counts.root
    summed = (each + FLOAT32) * (counts.adapter_of_block if lora.rank else max(counts.block, counts.root))
    kept = kept_bytes(shape, lora, stage.tokens, each, checkpointed=sharding.activation_checkpointing)
    less_kept = "" if sharding.activation_checkpointing else "sharding.activation_checkpointing=true or "
    compute_helps = "sharding.compute_dtype=bfloat16" if sharding.compute_dtype == "float32" else ""
    yield Part("activations", kept, less_kept + stage.helps)
    yield Part("logits", logits_bytes(shape, stage.tokens, each))
    yield Part("gathered blocks, embedding and head", each * blocks + summed, compute_helps)
    yield Part("CUDA and NCCL", _CONTEXT_BYTES + _NCCL_BYTES * (num_workers > 1))
    if not sharding.cpu_offload:
        yield from _weights(recipe, counts, of_copy, stage)
        state = FLOAT32 * (1 + _MOMENTS) * counts.trained / of_copy
        yield Part("gradient and AdamW's moments", state, _MORE_WORKERS if lora.rank else _FEWER_TRAINED)
    if sharding.sums_locally(counts.trained, lora, num_workers):
        # It is reduced over the workers once per optimizer step.
        yield Part("gradient of this worker", FLOAT32 * counts.trained, "a smaller model.lora.rank" * bool(lora.rank))
    if recipe.weight_transport != OBJECT_STORE:
        offered = versions_at_a_time(recipe) * published_bytes(recipe, counts) / num_workers
        yield Part("versions that samplers fetch", offered, "weight_transport=object_store")
    if recipe.gpus.colocate:
        yield Part("CUDA of an offloaded sampler", _CONTEXT_BYTES)


def _weights(recipe: RunConfig, counts: ParameterCounts, of_copy: int, stage: _Stage) -> Iterator[Part]:
    """Yield the weights that are held for the whole stage, if a copy of the policy is on `of_copy` workers."""
    lora, each = recipe.model.lora, bytes_of(recipe.sharding.compute_dtype)
    policy = counts.policy / of_copy
    if stage.has_value:
        trained = (1 + _MOMENTS) * counts.trained / of_copy
        yield Part("the value model, gradient and moments", FLOAT32 * (policy + trained), _MORE_WORKERS)
    if stage.has_teacher:
        yield Part("the teacher", each * policy, _MORE_WORKERS)
    if not lora.rank:
        yield Part("weights in float32", FLOAT32 * policy, _FEWER_TRAINED)
        if stage.has_reference:
            # Held in the compute dtype.
            yield Part("the reference", each * policy, _FEWER_TRAINED)
        return
    if lora.base_weights == "nf4":
        # The blocks are replicated on every worker; the rest is sharded.
        quantized = _NF4_BYTES * counts.blocks + FLOAT32 * counts.root / of_copy
        yield Part("weights, of blocks in 4 bits", quantized, "a smaller model")
    else:
        is_stored_in_half = recipe.model.checkpoint is not None and not begins_merged(recipe)
        dtype = "bfloat16" if recipe.may_hold_base_in_bfloat16 and is_stored_in_half else "float32"
        helps = f"{_MORE_WORKERS} or model.lora.base_weights=nf4"
        yield Part(f"weights in {dtype}", bytes_of(dtype) * policy, helps)
    yield Part("the adapter in float32", FLOAT32 * counts.adapter / of_copy, _MORE_WORKERS)
    if stage.has_sft_adapter:
        # Replicated on every worker, in the compute dtype.
        yield Part("the adapter of SFT", each * counts.adapter, "a smaller model.lora.rank")


def _workers_per_copy(recipe: RunConfig, num_workers: int) -> int:
    """Return the number of workers over which one copy of the policy is sharded."""
    return min(recipe.sharding.workers_per_copy or num_workers, num_workers)
