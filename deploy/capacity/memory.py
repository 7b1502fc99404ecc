"""GPU memory of samplers and of the service's engines, derived from the recipe part by part."""

from __future__ import annotations

from dataclasses import dataclass

from actors.run_config import RunConfig
from deploy.capacity.activations import FLOAT32, bytes_of, forward_bytes
from deploy.capacity.shape import ParameterCounts, num_adapters
from learner.model.config import TransformerConfig
from rollout.request import Cache

CONTEXT_BYTES, NCCL_BYTES = 10**9, 10**9
"""Assumed, not measured: CUDA's context with its libraries, and NCCL's buffers with several GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of the memory of a process."""

    name: str
    """Display name."""
    num_bytes: float
    """Its size."""
    helps: str
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


def sampler_memory(recipe: RunConfig, shape: TransformerConfig) -> ProcessMemory:
    """Derive the memory of a sampler: one policy, and a forward of its slots, or of its largest work unit if less."""
    parts = _sampling_parts(recipe, shape, 1, min(recipe.rollout.engine.num_slots, recipe.max_requests_per_work_unit))
    if recipe.gpus.colocate:
        parts.append(Part(name="CUDA and NCCL of an offloaded learner", num_bytes=CONTEXT_BYTES + NCCL_BYTES, helps=""))
    return ProcessMemory(label="a sampler", kind="sampler", share=recipe.gpus.sampler, parts=largest_first(parts))


def engine_memory(recipe: RunConfig, shape: TransformerConfig, most_live: int) -> ProcessMemory:
    """Derive the memory of a service engine with up to `most_live` versions, of which one computes at a time."""
    parts = _sampling_parts(recipe, shape, most_live, recipe.rollout.engine.num_slots)
    return ProcessMemory(label="an engine", kind="engine", share=recipe.gpus.engine, parts=largest_first(parts))


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
        # Versions share their base, and SFT's adapter.
        adapters = each * (num_versions - 1 + num_adapters(recipe)) * counts.adapter
        weights.append(Part(name="adapters", num_bytes=adapters, helps="a smaller model.lora.rank"))
    elif num_versions > 1:
        others = each * (num_versions - 1) * counts.policy
        weights.append(Part(name="other versions", num_bytes=others, helps="a smaller service.max_live_versions"))
    parts = [
        *weights,
        Part(name="activations", num_bytes=forward_bytes(shape, tokens, each), helps=slots_help),
        Part(
            # In the policy's precision; in float32 shifted, and exponentiated.
            name="logits of the blocks",
            num_bytes=rows * params[0].block_length * shape.vocab_size * (each + 2 * FLOAT32),
            helps=f"{slots_help} or rollout.sampling.block_length",
        ),
        Part(name="CUDA", num_bytes=CONTEXT_BYTES, helps=""),
    ]
    caches_blocks = shape.is_block_causal and engine.block_cache
    if caches_blocks or any(param.cache is not Cache.NONE for param in params):
        keys = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        cached = engine.num_slots * (recipe.canvas_tokens + 1) * keys * each
        parts.append(Part(name="cache of keys and values", num_bytes=cached, helps=slots_help))
    return parts


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


def largest_first(parts: list[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda part: -part.num_bytes))
