"""Memory of a learner worker, derived from the recipe: weights, optimizer and activations by stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from actors.resources import OBJECT_STORE
from actors.run_config import RunConfig
from deploy.capacity.activations import FLOAT32, bytes_of, kept_bytes, logits_bytes
from deploy.capacity.memory import (
    CONTEXT_BYTES,
    NCCL_BYTES,
    Part,
    ProcessMemory,
    largest_first,
    published_bytes,
    versions_at_a_time,
)
from deploy.capacity.shape import ParameterCounts, begins_merged
from learner.model.config import TransformerConfig

_MOMENTS = 2
# NF4: half a byte, and a float32 scale for each 64 weights.
_NF4_BYTES = 0.5 + 4 / 64
# FSDP gathers the next block while one computes.
_GATHERED_BLOCKS = 2
_MORE_WORKERS = "more learner.num_workers"
_FEWER_TRAINED = f"{_MORE_WORKERS} or LoRA (model.lora.rank)"


def learner_memory(recipe: RunConfig, shape: TransformerConfig, num_workers: int) -> ProcessMemory:
    """Derive the GPU memory of one of `num_workers` learner workers, in the stage that takes most.

    Fewer workers may share one copy of the policy (`sharding.workers_per_copy`).
    """
    stages = [_in_stage(recipe, shape, num_workers, stage) for stage in _stages(recipe, num_workers)]
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
    workers_per_copy = _workers_per_copy(recipe, num_workers)
    # Colocated learners are never offloaded between a backward pass and its step, so their gradient is not.
    state = FLOAT32 * (_MOMENTS + (not is_offloaded)) * counts.trained / workers_per_copy
    held = (_weights(recipe, counts, workers_per_copy, stage) for stage in _stages(recipe, num_workers))
    return num_workers * (state + max(sum(part.num_bytes for part in parts) for parts in held))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """What differs from stage to stage."""

    label: str
    """Display name of the learner in this stage."""
    tokens: int
    """Maximum number of tokens of a forward pass."""
    helps: str
    """The field that reduces them."""
    has_sft_adapter: bool
    """Whether SFT's adapter is held in addition to the base."""
    has_reference: bool = False
    """Whether a copy of the policy is held as the reference."""
    has_teacher: bool = False
    """Whether a teacher is held, which is assumed to be as large as the policy."""


def _stages(recipe: RunConfig, num_workers: int) -> Iterator[_Stage]:
    """Yield the stages of the run: SFT, the rounds, and the control, which is SFT again."""
    lora, learner, canvas = recipe.model.lora, recipe.learner, recipe.canvas_tokens
    has_sft = recipe.sft.num_steps > 0
    after_sft = has_sft and lora.rank > 0
    of_sft = recipe.sft_micro_batch_tokens_for(num_workers)
    sft_helps = "a smaller sft.micro_batch_tokens" if of_sft > recipe.sft_tokens else _shorter(recipe.sft.max_tokens)
    if has_sft:
        yield _Stage(label="a learner worker in SFT", tokens=of_sft, helps=sft_helps, has_sft_adapter=False)
    if learner.num_rounds or not has_sft:
        is_longer = learner.micro_batch_tokens > canvas
        yield _Stage(
            label="a learner worker",
            tokens=max(learner.micro_batch_tokens, canvas),
            helps="a smaller learner.micro_batch_tokens" if is_longer else _shorter(None),
            has_sft_adapter=after_sft,
            has_reference=learner.objective.needs_reference and not lora.rank,
            has_teacher=learner.objective.needs_teacher,
        )
    if recipe.control.enabled:
        yield _Stage(label="a learner worker in the control", tokens=of_sft, helps=sft_helps, has_sft_adapter=after_sft)


def _shorter(sft_tokens: int | None) -> str:
    """Name the fields that make a canvas shorter."""
    canvas = "rollout.max_prompt_tokens or rollout.sampling.gen_length"
    return f"a smaller {'sft.max_tokens' if sft_tokens else canvas}"


def _in_stage(recipe: RunConfig, shape: TransformerConfig, num_workers: int, stage: _Stage) -> ProcessMemory:
    lora, sharding = recipe.model.lora, recipe.sharding
    counts, each = ParameterCounts.of(shape, lora), bytes_of(sharding.compute_dtype)
    workers_per_copy = _workers_per_copy(recipe, num_workers)
    kept = kept_bytes(shape, lora, stage.tokens, each, checkpointed=sharding.activation_checkpointing)
    less_kept = "" if sharding.activation_checkpointing else "sharding.activation_checkpointing=true or "
    # Gathered blocks, or with NF4 one dequantized layer. For trained blocks also their gradient, before it is reduced
    # over the workers.
    at_a_time = counts.layer if lora.base_weights == "nf4" else _GATHERED_BLOCKS * counts.block
    blocks = at_a_time + _GATHERED_BLOCKS * counts.adapter_of_block + counts.root
    summed = (each + FLOAT32) * (counts.adapter_of_block if lora.rank else max(counts.block, counts.root))
    compute_helps = "sharding.compute_dtype=bfloat16" if sharding.compute_dtype == "float32" else ""
    parts = [
        Part(name="activations", num_bytes=kept, helps=less_kept + stage.helps),
        Part(name="logits", num_bytes=logits_bytes(shape, stage.tokens, each), helps=""),
        Part(name="gathered blocks, embedding and head", num_bytes=each * blocks + summed, helps=compute_helps),
        Part(name="CUDA and NCCL", num_bytes=CONTEXT_BYTES + NCCL_BYTES * (num_workers > 1), helps=""),
    ]
    if not sharding.cpu_offload:
        state = FLOAT32 * (1 + _MOMENTS) * counts.trained / workers_per_copy
        parts += _weights(recipe, counts, workers_per_copy, stage)
        parts.append(
            Part(
                name="gradient and AdamW's moments",
                num_bytes=state,
                helps=_MORE_WORKERS if lora.rank else _FEWER_TRAINED,
            )
        )
    if recipe.weight_transport != OBJECT_STORE:
        offered = versions_at_a_time(recipe) * published_bytes(recipe, counts) / num_workers
        parts.append(
            Part(name="versions that samplers fetch", num_bytes=offered, helps="weight_transport=object_store")
        )
    if recipe.gpus.colocate:
        parts.append(Part(name="CUDA of an offloaded sampler", num_bytes=CONTEXT_BYTES, helps=""))
    return ProcessMemory(label=stage.label, kind="learner", share=recipe.gpus.learner, parts=largest_first(parts))


def _weights(recipe: RunConfig, counts: ParameterCounts, workers_per_copy: int, stage: _Stage) -> list[Part]:
    """Return the weights that are held for the whole stage."""
    each = bytes_of(recipe.sharding.compute_dtype)
    teacher = Part(name="the teacher", num_bytes=each * counts.policy / workers_per_copy, helps=_MORE_WORKERS)
    return _of_policy(recipe, counts, workers_per_copy, stage) + [teacher] * stage.has_teacher


def _of_policy(recipe: RunConfig, counts: ParameterCounts, workers_per_copy: int, stage: _Stage) -> list[Part]:
    """Return the weights of the policy, and of its reference."""
    lora, each = recipe.model.lora, bytes_of(recipe.sharding.compute_dtype)
    if not lora.rank:
        helps, weights = _FEWER_TRAINED, counts.policy / workers_per_copy
        parts = [Part(name="weights in float32", num_bytes=FLOAT32 * weights, helps=helps)]
        # Held in the compute dtype.
        return parts + [Part(name="the reference", num_bytes=each * weights, helps=helps)] * stage.has_reference
    if lora.base_weights == "nf4":
        # The blocks are replicated on every worker; the rest is sharded.
        quantized = _NF4_BYTES * counts.blocks + FLOAT32 * counts.root / workers_per_copy
        base = Part(name="weights, of blocks in 4 bits", num_bytes=quantized, helps="a smaller model")
    else:
        is_stored_in_half = recipe.model.checkpoint is not None and not begins_merged(recipe)
        in_half = recipe.may_hold_base_in_bfloat16 and is_stored_in_half
        dtype, helps = "bfloat16" if in_half else "float32", f"{_MORE_WORKERS} or model.lora.base_weights=nf4"
        base = Part(
            name=f"weights in {dtype}", num_bytes=bytes_of(dtype) * counts.policy / workers_per_copy, helps=helps
        )
    adapter = Part(
        name="the adapter in float32", num_bytes=FLOAT32 * counts.adapter / workers_per_copy, helps=_MORE_WORKERS
    )
    # Replicated on every worker, in the compute dtype.
    start = Part(name="the adapter of SFT", num_bytes=each * counts.adapter, helps="a smaller model.lora.rank")
    return [base, adapter, *[start] * stage.has_sft_adapter]


def _workers_per_copy(recipe: RunConfig, num_workers: int) -> int:
    """Return the number of workers over which one copy of the policy is sharded."""
    return min(recipe.sharding.workers_per_copy or num_workers, num_workers)
