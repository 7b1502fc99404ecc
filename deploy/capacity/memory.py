"""GPU memory of a process, counted from the recipe part by part; here that of samplers and of the service's engines."""

from __future__ import annotations

from dataclasses import dataclass

from actors.run_config import RunConfig
from deploy.capacity.activations import FLOAT32, bytes_of, forward_bytes
from deploy.capacity.shape import ParameterCounts, num_adapters
from learner.model.config import TransformerConfig
from rollout.request import Cache

CONTEXT_BYTES, NCCL_BYTES = 10**9, 10**9
"""Assumed, and measured by nobody: CUDA's context with its libraries, and NCCL's buffers where several GPUs meet."""


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
    kind: str
    """The field of `gpus` that says its share of a GPU: `sampler`."""
    share: float
    """That share."""
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
    """What a sampler takes: one policy, and a forward of all its slots, or of its largest portion."""
    parts = _sampling_parts(recipe, shape, 1, min(recipe.rollout.engine.num_slots, recipe.most_portion_requests))
    if recipe.gpus.colocate:
        parts.append(Part(name="CUDA and NCCL of a learner asleep", num_bytes=CONTEXT_BYTES + NCCL_BYTES, helps=""))
    return ProcessMemory(who="a sampler", kind="sampler", share=recipe.gpus.sampler, parts=largest_first(parts))


def engine_memory(recipe: RunConfig, shape: TransformerConfig, most_live: int) -> ProcessMemory:
    """What an engine of the service takes that holds up to `most_live` versions, of which one computes at a time."""
    parts = _sampling_parts(recipe, shape, most_live, recipe.rollout.engine.num_slots)
    return ProcessMemory(who="an engine", kind="engine", share=recipe.gpus.engine, parts=largest_first(parts))


def why_too_large(process: ProcessMemory, gpu_bytes: float, where: str) -> str | None:
    """Why a process does not fit its share of a GPU, with what helps; None where it does."""
    available = process.share * gpu_bytes
    if process.num_bytes <= available:
        return None
    share, more = ("", "") if process.share == 1 else (f"{process.share:g} of ", f", or a larger gpus.{process.kind}")
    most = largest(process.parts)
    return (
        f"{process.who} takes at least {process.num_bytes / 1e9:.1f} GB of GPU memory ({most.name} "
        f"{most.num_bytes / 1e9:.1f}), and {share}{where} has {available / 1e9:.1f}; take {most.helps}{more}"
    )


def _sampling_parts(recipe: RunConfig, shape: TransformerConfig, num_versions: int, most_rows: int) -> list[Part]:
    counts, lora, engine = ParameterCounts.of(shape, recipe.model.lora), recipe.model.lora, recipe.rollout.engine
    each = bytes_of(engine.dtype)
    dtype_helps = "rollout.engine.dtype=bfloat16" if engine.dtype == "float32" else "a smaller model"
    slots_help = "a smaller rollout.engine.num_slots"
    params = recipe.rollout.params
    rows = most_rows * (2 if any(param.cfg_scale for param in params) else 1)
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
        Part(name="CUDA", num_bytes=CONTEXT_BYTES, helps=""),
    ]
    remembers_blocks = shape.is_block_causal and engine.block_cache
    if remembers_blocks or any(param.cache is not Cache.NONE for param in params):
        keys = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        cached = engine.num_slots * (recipe.canvas_tokens + 1) * keys * each
        parts.append(Part(name="cache of keys and values", num_bytes=cached, helps=slots_help))
    return parts


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


def largest_first(parts: list[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda part: -part.num_bytes))
