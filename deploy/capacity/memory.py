"""GPU memory of a run's processes, counted from the recipe: what each holds, and the most that passes through it.

Letters: T tokens of a forward, D width, H inner width of the feed-forward, K width of keys, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.run_config import RunConfig
from deploy.capacity.shape import ParameterCounts
from learner.model.config import TransformerConfig
from learner.model.moe.config import MoEConfig
from rollout.request import Cache

# Assumed, and measured by nobody: CUDA's context with its libraries, and NCCL's buffers where several GPUs meet.
_CONTEXT_BYTES, _NCCL_BYTES = 10**9, 10**9
_FLOAT32 = 4
_INT64 = 8
_MOMENTS = 2
# NF4: half a byte, and a float32 scale that is itself held in 8 bits for each 64 weights.
_NF4_BYTES = 0.5 + 1 / 64
# FSDP gathers the next block while one computes.
_GATHERED_BLOCKS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One thing that takes memory of a GPU."""

    name: str
    """What it is."""
    num_bytes: float
    """How much it takes."""
    helps: str
    """What would make it smaller: fields of the recipe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMemory:
    """What one process takes of its GPU."""

    who: str
    """`a sampler`."""
    share: float
    """Of a GPU that it has."""
    parts: tuple[Part, ...]
    """What takes it."""

    @property
    def num_bytes(self) -> float:
        """All of it."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def largest(self) -> Part:
        """The part that takes most of those that a field makes smaller."""
        return max((part for part in self.parts if part.helps), key=lambda part: part.num_bytes)


def sampler_memory(recipe: RunConfig, shape: TransformerConfig) -> ProcessMemory:
    """What a sampler takes: its policy, under LoRA what adapters are merged into, and a forward of all its slots."""
    counts, engine = ParameterCounts.of(shape, recipe.model.lora), recipe.rollout.engine
    each = _bytes_of(engine.dtype)
    dtype_helps = "rollout.engine.dtype=bfloat16" if engine.dtype == "float32" else "a smaller model"
    slots_help = "a smaller rollout.engine.num_slots"
    params = recipe.rollout.params
    rows = engine.num_slots * (2 if any(param.cfg_scale for param in params) else 1)
    tokens = rows * recipe.canvas_tokens
    parts = [
        Part(name="weights", num_bytes=each * counts.policy, helps=dtype_helps),
        Part(name="activations", num_bytes=_forward_bytes(shape, tokens, each), helps=slots_help),
        Part(
            # In the policy's precision; shifted in float32, and their exponentials.
            name="logits of the blocks",
            num_bytes=rows * params[0].block_length * shape.vocab_size * (each + 2 * _FLOAT32),
            helps=f"{slots_help} or rollout.sampling.block_length",
        ),
    ]
    if recipe.model.lora.rank:
        # As the checkpoint has it: in bfloat16 as a rule, where there is one.
        stored = _bytes_of("bfloat16" if recipe.model.checkpoint is not None else "float32")
        parts.append(Part(name="what adapters are merged into", num_bytes=stored * counts.policy, helps=""))
    remembers_blocks = shape.is_block_causal and engine.block_cache
    if remembers_blocks or any(param.cache is not Cache.NONE for param in params):
        keys = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        cached = engine.num_slots * (recipe.canvas_tokens + 1) * keys * each
        parts.append(Part(name="cache of keys and values", num_bytes=cached, helps=slots_help))
    parts.append(Part(name="CUDA", num_bytes=_CONTEXT_BYTES, helps=""))
    if recipe.gpus.colocate:
        parts.append(Part(name="CUDA and NCCL of a learner asleep", num_bytes=_CONTEXT_BYTES + _NCCL_BYTES, helps=""))
    return ProcessMemory(who="a sampler", share=recipe.gpus.sampler, parts=_largest_first(parts))


def learner_memory(recipe: RunConfig, shape: TransformerConfig, num_workers: int) -> ProcessMemory:
    """What one of so many learner workers takes, of which a copy of the policy may have fewer."""
    counts, lora = ParameterCounts.of(shape, recipe.model.lora), recipe.model.lora
    each = _bytes_of(recipe.sharding.compute_dtype)
    workers_help = "more learner.num_workers" + ("" if lora.rank else " or LoRA (model.lora.rank)")
    num_sharing = min(recipe.sharding.workers_per_copy or num_workers, num_workers)
    parts = [*_held(recipe, counts, num_sharing, workers_help), *_passing(recipe, shape, counts)]
    if recipe.gpus.colocate:
        parts.append(Part(name="CUDA of a sampler asleep", num_bytes=_CONTEXT_BYTES, helps=""))
    if not recipe.sharding.cpu_offload:
        state = _FLOAT32 * (1 + _MOMENTS) * counts.trained / num_sharing
        parts.append(Part(name="gradient and AdamW's moments", num_bytes=state, helps=workers_help))
    cuda = _CONTEXT_BYTES + (_NCCL_BYTES if num_workers > 1 else 0)
    # Blocks as they are gathered; of trained ones their gradient too, before it is summed over the workers.
    blocks = _GATHERED_BLOCKS * (counts.block * (lora.base_weights == "full") + counts.adapter_of_block) + counts.root
    summed = (each + _FLOAT32) * (counts.adapter_of_block if lora.rank else max(counts.block, counts.root))
    compute_helps = "sharding.compute_dtype=bfloat16" if recipe.sharding.compute_dtype == "float32" else ""
    parts += [
        Part(name="gathered blocks, embedding and head", num_bytes=each * blocks + summed, helps=compute_helps),
        Part(name="CUDA and NCCL", num_bytes=cuda, helps=""),
    ]
    return ProcessMemory(who="a learner worker", share=recipe.gpus.learner, parts=_largest_first(parts))


def asleep_bytes(recipe: RunConfig, shape: TransformerConfig) -> float:
    """What all learner workers together put into main memory while samplers have their GPUs: weights and moments."""
    if not recipe.gpus.colocate or recipe.sharding.cpu_offload:
        return 0.0
    counts, num_workers = ParameterCounts.of(shape, recipe.model.lora), recipe.learner.num_workers
    num_sharing = min(recipe.sharding.workers_per_copy or num_workers, num_workers)
    moments = _FLOAT32 * _MOMENTS * (counts.adapter or counts.policy) / num_sharing
    held = sum(part.num_bytes for part in _held(recipe, counts, num_sharing, ""))
    return num_workers * (held + moments)


def why_too_large(process: ProcessMemory, gpu_bytes: float, where: str) -> str | None:
    """Why a process does not fit its share of a GPU, with what helps; None where it does."""
    available = process.share * gpu_bytes
    if process.num_bytes <= available:
        return None
    share = "" if process.share == 1 else f"{process.share:g} of "
    largest = process.largest
    return (
        f"{process.who} takes at least {process.num_bytes / 1e9:.1f} GB of GPU memory ({largest.name} "
        f"{largest.num_bytes / 1e9:.1f}), and {share}{where} has {available / 1e9:.1f}; take {largest.helps}"
    )


def saved_bytes_of_token(shape: TransformerConfig, each: int, layer: int = 0) -> int:
    """What a block keeps of a token for its backward pass: the stream before both sublayers and after both norms, what
    attention takes and gives, and four of the feed-forward's inner width. Queries and keys are kept before, in and
    after their norm; behind a mask, what attention gives is kept once more in the order of the tokens."""
    queries, key_value = shape.attention_width, shape.num_kv_heads * shape.head_dim
    normed = 2 * (queries + key_value) * shape.qk_norm
    attention = 2 * queries + 2 * key_value + normed + queries * shape.is_block_causal
    moe = shape.experts_of(layer)
    if moe is None:
        return each * (6 * shape.d_model + attention + 4 * shape.mlp_hidden_size)
    feed_forward = _inner_numbers(shape, layer) + 4 * moe.shared_width
    return each * (6 * shape.d_model + attention + feed_forward) + _routing_bytes(shape, moe, each)


def _routing_bytes(shape: TransformerConfig, moe: MoEConfig, each: int) -> int:
    """What a router keeps of a token: its input in float32, scores, weights twice and their sum; and three indices."""
    wide = shape.d_model * (each != _FLOAT32)
    return _FLOAT32 * (wide + moe.num_experts + 2 * moe.experts_per_token + 1) + 3 * _INT64 * moe.experts_per_token


def _inner_numbers(shape: TransformerConfig, layer: int) -> int:
    """Numbers that a feed-forward has of a token at a time: gate and up; of each expert what it takes, its gate and up,
    one of them activated, their product, and what it gives."""
    moe = shape.experts_of(layer)
    if moe is None:
        return 2 * shape.mlp_hidden_size
    return moe.experts_per_token * (2 * shape.d_model + 4 * moe.expert_width)


def _held(recipe: RunConfig, counts: ParameterCounts, num_sharing: int, helps: str) -> list[Part]:
    """Weights, which stay for the whole stage."""
    lora = recipe.model.lora
    if recipe.sharding.cpu_offload:
        return []
    if lora.base_weights == "nf4":
        # The blocks whole on every worker; the rest, and the adapter, sharded.
        quantized = _NF4_BYTES * counts.blocks + _FLOAT32 * (counts.root + counts.adapter) / num_sharing
        return [Part(name="weights in 4 bits, and the adapter", num_bytes=quantized, helps=helps)]
    if recipe.may_hold_base_in_half and recipe.model.checkpoint is not None:
        held = (_bytes_of("bfloat16") * counts.policy + _FLOAT32 * counts.adapter) / num_sharing
        return [Part(name="weights in bfloat16, and the adapter", num_bytes=held, helps=helps)]
    weights = _FLOAT32 * (counts.policy + counts.adapter) / num_sharing
    parts = [Part(name="weights in float32", num_bytes=weights, helps=helps)]
    if recipe.learner.objective.needs_reference and not lora.rank:
        # Held as it computes.
        reference = _bytes_of(recipe.sharding.compute_dtype) * counts.policy / num_sharing
        parts.append(Part(name="the reference", num_bytes=reference, helps=helps))
    return parts


def _passing(recipe: RunConfig, shape: TransformerConfig, counts: ParameterCounts) -> list[Part]:
    """Activations and logits of the largest micro-batch."""
    # Here and not above: it needs torch, and a recipe for CPUs is checked without.
    from learner.model.scoring import MOST_KEPT_GPU, MOST_LOGITS_GPU

    each, tokens = _bytes_of(recipe.sharding.compute_dtype), recipe.learner.micro_batch_tokens
    tokens = max(tokens, recipe.canvas_tokens)
    layers = range(shape.num_layers)
    of_blocks = [tokens * saved_bytes_of_token(shape, each, layer) for layer in layers]
    inner = max(_inner_numbers(shape, layer) for layer in layers)
    if recipe.sharding.activation_checkpointing:
        # The input of each block, and one block's backward pass, with gradients in flight beside what it kept.
        in_flight = tokens * each * (2 * shape.d_model + inner)
        kept, helps = float(shape.num_layers * tokens * each * shape.d_model + max(of_blocks) + in_flight), ""
    else:
        kept, helps = float(sum(of_blocks)), "sharding.activation_checkpointing=true or "
    logits = min(tokens * shape.vocab_size, MOST_LOGITS_GPU) * (each + _FLOAT32)
    logits += min(tokens * shape.vocab_size, MOST_KEPT_GPU) * _FLOAT32
    lora = recipe.model.lora
    num_adapted = sum(len(shape.linear_layers(layer).keys() & set(lora.targets)) for layer in layers)
    adapters = num_adapted * tokens * each * lora.rank
    if counts.adapter and not recipe.sharding.activation_checkpointing:
        kept += adapters
    smaller = f"{helps}a smaller learner.micro_batch_tokens"
    return [
        Part(name="activations", num_bytes=kept, helps=smaller),
        Part(name="logits", num_bytes=logits, helps=""),
    ]


def _forward_bytes(shape: TransformerConfig, tokens: int, each: int) -> float:
    """The most that a forward without gradient has at a time: of attention, rotated in float32, or of the
    feed-forward."""
    width, key_value = shape.attention_width, shape.num_kv_heads * shape.head_dim
    attention = each * (shape.d_model + 2 * width + 2 * key_value) + 3 * _FLOAT32 * width
    inner = max(_inner_numbers(shape, layer) for layer in range(shape.num_layers))
    feed_forward = each * (2 * shape.d_model + inner)
    return tokens * max(attention, feed_forward)


def _bytes_of(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else _FLOAT32


def _largest_first(parts: list[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda part: -part.num_bytes))
