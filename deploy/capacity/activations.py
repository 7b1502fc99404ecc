"""Activations of the policy, counted from its shape: what passes through a GPU beside what stays on it.

Counted as a GPU runs it: its kernel for RMSNorm keeps what it is given, where a CPU also keeps what it divided.

Letters: T tokens of a forward, D width, H inner width of the feed-forward, K width of keys, V vocabulary.
"""

from __future__ import annotations

from learner.model.config import TransformerConfig
from learner.model.lora_config import LoraConfig

FLOAT32 = 4
"""Bytes of a float32."""
_INT64 = 8


def bytes_of(dtype: str) -> int:
    """Bytes of a number."""
    return 2 if dtype == "bfloat16" else FLOAT32


def kept_bytes(shape: TransformerConfig, lora: LoraConfig, tokens: int, each: int, *, checkpointed: bool) -> float:
    """What the blocks keep for a backward pass, and one block's backward pass beside it, at most.

    With activation checkpointing it is the input of each block, and one block at a time in full.
    """
    layers = range(shape.num_layers)
    blocks = [tokens * saved_bytes_of_token(shape, lora, each, layer) for layer in layers]
    # Gradients of the stream and of the feed-forward, which no block keeps.
    in_flight = tokens * each * (2 * shape.d_model + max(_inner_numbers(shape, layer) for layer in layers))
    if checkpointed:
        return float(shape.num_layers * tokens * each * shape.d_model + max(blocks) + in_flight)
    return float(sum(blocks) + in_flight)


def saved_bytes_of_token(shape: TransformerConfig, lora: LoraConfig, each: int, layer: int = 0) -> int:
    """What a block keeps of a token for its backward pass. Under LoRA it does not keep the input of a layer without an
    adapter, and it keeps what lies between the two matrices of an adapter."""
    trained = _trained_layers(shape, lora, layer)
    between = lora.rank * len(trained)
    return each * (between + _of_attention(shape, trained)) + _bytes_of_feed_forward(shape, lora, trained, each, layer)


def forward_bytes(shape: TransformerConfig, tokens: int, each: int) -> float:
    """The most that a forward without gradient has at a time: of attention, rotated in float32, or of the
    feed-forward."""
    width, key_value = shape.attention_width, shape.num_kv_heads * shape.head_dim
    attention = each * (shape.d_model + 2 * width + 2 * key_value) + 3 * FLOAT32 * width
    inner = max(_inner_numbers(shape, layer) for layer in range(shape.num_layers))
    feed_forward = each * (2 * shape.d_model + inner)
    return tokens * max(attention, feed_forward)


def logits_bytes(shape: TransformerConfig, tokens: int, each: int) -> float:
    """Logits of the learner: a chunk of them in the policy's precision and in float32, and chunks that are kept."""
    # Here and not above: it needs torch, and a recipe for CPUs is checked without.
    from learner.model.scoring import MOST_KEPT_GPU, MOST_LOGITS_GPU

    logits = tokens * shape.vocab_size
    return min(logits, MOST_LOGITS_GPU) * (each + FLOAT32) + min(logits, MOST_KEPT_GPU) * FLOAT32


def _trained_layers(shape: TransformerConfig, lora: LoraConfig, layer: int) -> set[str]:
    """The linear layers of a block that have a gradient."""
    there = set(shape.linear_layers(layer))
    return there & set(lora.targets) if lora.rank else there


def _of_attention(shape: TransformerConfig, trained: set[str]) -> int:
    """Numbers that attention keeps: the stream before it and after its norm, queries, keys and values, and what it
    gives; queries and keys before their norm too, and behind a mask, what it gives in the order of the tokens."""
    queries, key_value = shape.attention_width, shape.num_kv_heads * shape.head_dim
    of_norms = (queries + key_value) * shape.qk_norm
    in_order = queries * (shape.is_block_causal and "out_proj" in trained)
    stream = shape.d_model * (1 + bool(trained & {"q_proj", "k_proj", "v_proj"}))
    return stream + 2 * queries + 2 * key_value + of_norms + in_order


def _bytes_of_feed_forward(shape: TransformerConfig, lora: LoraConfig, trained: set[str], each: int, layer: int) -> int:
    """The stream before it and after its norm, gate, up, the activated gate, and the product.

    Of each expert that a token takes also what goes in and what comes out. Of the router: its input in float32, scores,
    weights twice and their sum, and three indices.
    """
    moe, takes_up, is_whole = shape.experts_of(layer), bool(trained & {"gate_proj", "up_proj"}), not lora.rank
    num_inner = 3 + ("down_proj" in trained)
    if moe is None:
        return each * (shape.d_model * (1 + takes_up) + num_inner * shape.mlp_hidden_size)
    of_expert = shape.d_model * (1 + is_whole) + moe.expert_width * (3 + is_whole)
    numbers = shape.d_model * (1 + (is_whole or takes_up)) + moe.experts_per_token * of_expert
    in_float32 = shape.d_model * (is_whole and each != FLOAT32)
    routing = FLOAT32 * (in_float32 + moe.num_experts + 2 * moe.experts_per_token + 1)
    return each * (numbers + num_inner * moe.shared_width) + routing + 3 * _INT64 * moe.experts_per_token


def _inner_numbers(shape: TransformerConfig, layer: int) -> int:
    """Numbers that a feed-forward has of a token at a time: gate and up; of each expert what it takes, its gate and up,
    one of them activated, their product, and what it gives."""
    moe = shape.experts_of(layer)
    if moe is None:
        return 2 * shape.mlp_hidden_size
    return moe.experts_per_token * (2 * shape.d_model + 4 * moe.expert_width)
