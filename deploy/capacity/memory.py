"""GPU memory of a run's processes, counted from the recipe: what each holds, and the most that passes through it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from actors.resources import OBJECT_STORE
from actors.run_config import RunConfig
from deploy.capacity.activations import FLOAT32, bytes_of, forward_bytes, kept_bytes, logits_bytes
from deploy.capacity.shape import ParameterCounts, num_adapters
from learner.model.config import TransformerConfig
from rollout.request import Cache

# Assumed, and measured by nobody: CUDA's context with its libraries, and NCCL's buffers where several GPUs meet.
_CONTEXT_BYTES, _NCCL_BYTES = 10**9, 10**9
_MOMENTS = 2
# NF4: half a byte, and a float32 scale for each 64 weights.
_NF4_BYTES = 0.5 + 4 / 64
# FSDP gathers the next block while one computes.
_GATHERED_BLOCKS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One thing that takes memory."""

    name: str
    """What it is."""
    num_bytes: float
    """How much it takes."""
    helps: str
    """What would make it smaller: fields of the recipe. Empty: nothing in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMemory:
    """What one process takes of its GPU."""

    who: str
    """`a sampler`."""
    share: float
    """Of a GPU that it has."""
    parts: tuple[Part, ...]
    """What takes it, the largest first."""

    @property
    def num_bytes(self) -> float:
        """All of it."""
        return sum(part.num_bytes for part in self.parts)


def largest(parts: tuple[Part, ...]) -> Part:
    """The part that takes most of those that a field makes smaller."""
    return max((part for part in parts if part.helps), key=lambda part: part.num_bytes)


def sampler_memory(recipe: RunConfig, shape: TransformerConfig) -> ProcessMemory:
    """What a sampler takes: one policy, and a forward of all its slots."""
    parts = _sampling_parts(recipe, shape, 1)
    if recipe.gpus.colocate:
        parts.append(Part(name="CUDA and NCCL of a learner asleep", num_bytes=_CONTEXT_BYTES + _NCCL_BYTES, helps=""))
    return ProcessMemory(who="a sampler", share=recipe.gpus.sampler, parts=_largest_first(parts))


def engine_memory(recipe: RunConfig, shape: TransformerConfig, most_live: int) -> ProcessMemory:
    """What an engine of the service takes that holds up to `most_live` versions, of which one computes at a time."""
    parts = _sampling_parts(recipe, shape, most_live)
    return ProcessMemory(who="an engine", share=recipe.gpus.engine, parts=_largest_first(parts))


def learner_memory(recipe: RunConfig, shape: TransformerConfig, num_workers: int) -> ProcessMemory:
    """What one of so many learner workers takes, in the stage that takes most. A copy of the policy may have fewer."""
    stages = [_in_stage(recipe, shape, num_workers, stage) for stage in _stages(recipe, num_workers)]
    return max(stages, key=lambda process: process.num_bytes)


def main_memory_of_learner(recipe: RunConfig, shape: TransformerConfig) -> float:
    """What all learner workers together have in main memory, of weights and moments: all of it on CPUs and with
    `cpu_offload`; of GPUs that they share with samplers, what sleeps."""
    counts, num_workers = ParameterCounts.of(shape, recipe.model.lora), recipe.learner.num_workers
    sleeps = recipe.device == "cuda" and not recipe.sharding.cpu_offload
    if sleeps and not recipe.gpus.colocate:
        return 0.0
    num_sharing = _num_sharing(recipe, num_workers)
    # Nobody sleeps between a backward pass and its step.
    state = FLOAT32 * (_MOMENTS + (not sleeps)) * counts.trained / num_sharing
    held = (_held(recipe, counts, num_sharing, stage, "") for stage in _stages(recipe, num_workers))
    return num_workers * (state + max(sum(part.num_bytes for part in parts) for parts in held))


def why_too_large(process: ProcessMemory, gpu_bytes: float, where: str) -> str | None:
    """Why a process does not fit its share of a GPU, with what helps; None where it does."""
    available = process.share * gpu_bytes
    if process.num_bytes <= available:
        return None
    share = "" if process.share == 1 else f"{process.share:g} of "
    most = largest(process.parts)
    return (
        f"{process.who} takes at least {process.num_bytes / 1e9:.1f} GB of GPU memory ({most.name} "
        f"{most.num_bytes / 1e9:.1f}), and {share}{where} has {available / 1e9:.1f}; take {most.helps}"
    )


def sft_tokens_at_a_time(recipe: RunConfig, num_workers: int) -> int:
    """Tokens of a forward of SFT on one worker, at most: its share of a batch, or a micro-batch of that."""
    of_batch = -(-recipe.sft.batch_size // num_workers) * recipe.sft_tokens
    if recipe.sft.micro_batch_tokens is None:
        return of_batch
    return min(of_batch, max(recipe.sft.micro_batch_tokens, recipe.sft_tokens))


def _sampling_parts(recipe: RunConfig, shape: TransformerConfig, num_versions: int) -> list[Part]:
    counts, lora, engine = ParameterCounts.of(shape, recipe.model.lora), recipe.model.lora, recipe.rollout.engine
    each = bytes_of(engine.dtype)
    dtype_helps = "rollout.engine.dtype=bfloat16" if engine.dtype == "float32" else "a smaller model"
    slots_help = "a smaller rollout.engine.num_slots"
    params = recipe.rollout.params
    rows = engine.num_slots * (2 if any(param.cfg_scale for param in params) else 1)
    tokens = rows * recipe.canvas_tokens
    weights = [Part(name="weights", num_bytes=each * counts.policy, helps=dtype_helps)]
    if lora.rank:
        # Versions share their base, and what SFT added to it.
        adapters = each * (num_versions - 1 + num_adapters(recipe)) * counts.adapter
        weights.append(Part(name="adapters", num_bytes=adapters, helps="a smaller model.lora.rank"))
    elif num_versions > 1:
        others = each * (num_versions - 1) * counts.policy
        weights.append(Part(name="other versions", num_bytes=others, helps="a smaller service.max_live_versions"))
    parts = [
        *weights,
        Part(name="activations", num_bytes=forward_bytes(shape, tokens, each), helps=slots_help),
        Part(
            # In the policy's precision; shifted in float32, and their exponentials.
            name="logits of the blocks",
            num_bytes=rows * params[0].block_length * shape.vocab_size * (each + 2 * FLOAT32),
            helps=f"{slots_help} or rollout.sampling.block_length",
        ),
        Part(name="CUDA", num_bytes=_CONTEXT_BYTES, helps=""),
    ]
    remembers_blocks = shape.is_block_causal and engine.block_cache
    if remembers_blocks or any(param.cache is not Cache.NONE for param in params):
        keys = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        cached = engine.num_slots * (recipe.canvas_tokens + 1) * keys * each
        parts.append(Part(name="cache of keys and values", num_bytes=cached, helps=slots_help))
    return parts


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """What differs from stage to stage."""

    who: str
    """The learner in it."""
    tokens: int
    """Of a forward, at most."""
    helps: str
    """What makes these fewer."""
    has_start: bool
    """Whether SFT's adapter is beside the base."""
    has_reference: bool = False
    """Whether a copy of the policy is held."""


def _stages(recipe: RunConfig, num_workers: int) -> Iterator[_Stage]:
    """Those of the run: SFT, the rounds, and the control, which is SFT again."""
    lora, learner, canvas = recipe.model.lora, recipe.learner, recipe.canvas_tokens
    has_sft = recipe.sft.num_steps > 0
    after_sft = has_sft and lora.rank > 0
    of_sft = sft_tokens_at_a_time(recipe, num_workers)
    sft_helps = "a smaller sft.micro_batch_tokens" if of_sft > recipe.sft_tokens else _shorter(recipe.sft.max_tokens)
    if has_sft:
        yield _Stage(who="a learner worker in SFT", tokens=of_sft, helps=sft_helps, has_start=False)
    if learner.num_rounds or not has_sft:
        is_longer = learner.micro_batch_tokens > canvas
        yield _Stage(
            who="a learner worker",
            tokens=max(learner.micro_batch_tokens, canvas),
            helps="a smaller learner.micro_batch_tokens" if is_longer else _shorter(None),
            has_start=after_sft,
            has_reference=learner.objective.needs_reference and not lora.rank,
        )
    if recipe.control.enabled:
        yield _Stage(who="a learner worker in the control", tokens=of_sft, helps=sft_helps, has_start=after_sft)


def _shorter(sft_tokens: int | None) -> str:
    """What makes a canvas shorter."""
    canvas = "rollout.max_prompt_tokens or rollout.sampling.gen_length"
    return f"a smaller {'sft.max_tokens' if sft_tokens else canvas}"


def _in_stage(recipe: RunConfig, shape: TransformerConfig, num_workers: int, stage: _Stage) -> ProcessMemory:
    lora, sharding = recipe.model.lora, recipe.sharding
    counts, each = ParameterCounts.of(shape, lora), bytes_of(sharding.compute_dtype)
    num_sharing = _num_sharing(recipe, num_workers)
    workers_help = "more learner.num_workers" + ("" if lora.rank else " or LoRA (model.lora.rank)")
    kept = kept_bytes(shape, lora, stage.tokens, each, checkpointed=sharding.activation_checkpointing)
    kept_helps = (
        stage.helps if sharding.activation_checkpointing else f"sharding.activation_checkpointing=true or {stage.helps}"
    )
    # Blocks as they are gathered, or a layer of which 4 bits are made whole; of trained ones their gradient too, before
    # it is summed over the workers.
    at_a_time = counts.layer if lora.base_weights == "nf4" else _GATHERED_BLOCKS * counts.block
    blocks = at_a_time + _GATHERED_BLOCKS * counts.adapter_of_block + counts.root
    summed = (each + FLOAT32) * (counts.adapter_of_block if lora.rank else max(counts.block, counts.root))
    compute_helps = "sharding.compute_dtype=bfloat16" if sharding.compute_dtype == "float32" else ""
    parts = [
        Part(name="activations", num_bytes=kept, helps=kept_helps),
        Part(name="logits", num_bytes=logits_bytes(shape, stage.tokens, each), helps=""),
        Part(name="gathered blocks, embedding and head", num_bytes=each * blocks + summed, helps=compute_helps),
        Part(name="CUDA and NCCL", num_bytes=_CONTEXT_BYTES + _NCCL_BYTES * (num_workers > 1), helps=""),
    ]
    if not sharding.cpu_offload:
        state = FLOAT32 * (1 + _MOMENTS) * counts.trained / num_sharing
        parts += _held(recipe, counts, num_sharing, stage, workers_help)
        parts.append(Part(name="gradient and AdamW's moments", num_bytes=state, helps=workers_help))
    if recipe.weight_transport != OBJECT_STORE:
        offered = versions_at_a_time(recipe) * published_bytes(recipe, counts) / num_workers
        parts.append(
            Part(name="versions that samplers fetch", num_bytes=offered, helps="weight_transport=object_store")
        )
    if recipe.gpus.colocate:
        parts.append(Part(name="CUDA of a sampler asleep", num_bytes=_CONTEXT_BYTES, helps=""))
    return ProcessMemory(who=stage.who, share=recipe.gpus.learner, parts=_largest_first(parts))


def sampler_weight_bytes(recipe: RunConfig, counts: ParameterCounts) -> float:
    """What one policy takes as a sampler holds it, with what adapters it has."""
    return bytes_of(recipe.rollout.engine.dtype) * (counts.policy + num_adapters(recipe) * counts.adapter)


def versions_at_a_time(recipe: RunConfig) -> int:
    """Policy versions that are held for the samplers: those that the weight store keeps, and one that arrives."""
    return recipe.learner.max_staleness + 3


def published_bytes(recipe: RunConfig, counts: ParameterCounts) -> float:
    """What a version takes as it travels: an adapter in float32; whole weights in the samplers' precision."""
    if recipe.model.lora.rank:
        return FLOAT32 * counts.adapter
    return bytes_of(recipe.rollout.engine.dtype) * counts.policy


def _held(recipe: RunConfig, counts: ParameterCounts, num_sharing: int, stage: _Stage, helps: str) -> list[Part]:
    """Weights, which stay for the whole stage."""
    lora, each = recipe.model.lora, bytes_of(recipe.sharding.compute_dtype)
    if not lora.rank:
        parts = [Part(name="weights in float32", num_bytes=FLOAT32 * counts.policy / num_sharing, helps=helps)]
        if stage.has_reference:
            # Held as it computes.
            parts.append(Part(name="the reference", num_bytes=each * counts.policy / num_sharing, helps=helps))
        return parts
    adapter = Part(name="the adapter in float32", num_bytes=FLOAT32 * counts.adapter / num_sharing, helps=helps)
    if lora.base_weights == "nf4":
        # The blocks whole on every worker; the rest sharded.
        quantized = _NF4_BYTES * counts.blocks + FLOAT32 * counts.root / num_sharing
        base = Part(name="weights, of blocks in 4 bits", num_bytes=quantized, helps="a smaller model")
    else:
        in_half = recipe.may_hold_base_in_half and recipe.model.checkpoint is not None
        dtype = "bfloat16" if in_half else "float32"
        base = Part(name=f"weights in {dtype}", num_bytes=bytes_of(dtype) * counts.policy / num_sharing, helps=helps)
    if not stage.has_start:
        return [base, adapter]
    # Whole on every worker, as it computes.
    return [
        base,
        adapter,
        Part(name="the adapter of SFT", num_bytes=each * counts.adapter, helps="a smaller model.lora.rank"),
    ]


def _num_sharing(recipe: RunConfig, num_workers: int) -> int:
    """Workers that hold one copy of the policy between them."""
    return min(recipe.sharding.workers_per_copy or num_workers, num_workers)


def _largest_first(parts: list[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda part: -part.num_bytes))
