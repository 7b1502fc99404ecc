"""Parameter counts and activation memory of a policy, from its shape: forward, backward and logits.

Activations are counted as on a GPU, whose RMSNorm kernel saves only its input, while a CPU also saves the normalized
value.
"""

from __future__ import annotations

from dataclasses import dataclass

from learner.model.config import TransformerConfig
from learner.model.lora_config import LoraConfig

FLOAT32 = 4
"""Bytes of a float32."""
_INT64 = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Parameter counts of a policy, by location."""

    block: int
    """The largest block."""
    blocks: int
    """All blocks."""
    root: int
    """The embedding, the final norm and the head."""
    frozen: int
    """The part of the blocks that is never trained: the biases of routers."""
    adapter: int
    """LoRA's matrices over all blocks; 0 without LoRA."""
    adapter_of_block: int
    """LoRA's matrices in one block, at most."""
    layer: int
    """The largest linear layer of a block."""

    @property
    def policy(self) -> int:
        """Number of parameters of the policy without an adapter."""
        return self.blocks + self.root

    @property
    def trained(self) -> int:
        """Number of parameters that the optimizer updates."""
        return self.adapter or self.policy - self.frozen

    @classmethod
    def of(cls, shape: TransformerConfig, lora: LoraConfig) -> ParameterCounts:
        """Count the parameters of a shape."""
        layers = range(shape.num_layers)
        frozen = [moe.num_experts * moe.has_bias if (moe := shape.experts_of(layer)) else 0 for layer in layers]
        blocks = [_trained_of_block(shape, layer) + frozen[layer] for layer in layers]
        adapters = [
            lora.rank * sum(sum(size) for name, size in shape.linear_layers(layer).items() if name in lora.targets)
            for layer in layers
        ]
        matrices = 1 if shape.tied_embeddings else 2
        return cls(
            block=max(blocks),
            blocks=sum(blocks),
            root=matrices * shape.vocab_size * shape.d_model + shape.d_model,
            frozen=sum(frozen),
            adapter=sum(adapters),
            adapter_of_block=max(adapters),
            layer=max(inputs * outputs for layer in layers for inputs, outputs in shape.linear_layers(layer).values()),
        )


def bytes_of(dtype: str) -> int:
    """Return the bytes of one number."""
    return 2 if dtype == "bfloat16" else FLOAT32


def kept_bytes(shape: TransformerConfig, lora: LoraConfig, tokens: int, each: int, *, checkpointed: bool) -> float:
    """Count what the blocks save for a backward pass, plus the backward pass of one block: the peak.

    With activation checkpointing that is the input of each block, and all of one block at a time.
    """
    layers = range(shape.num_layers)
    blocks = [tokens * saved_bytes_of_token(shape, lora, each, layer) for layer in layers]
    # Gradients of the residual stream and of the feed-forward, which no block saves.
    in_flight = tokens * each * (2 * shape.d_model + max(_inner_numbers(shape, layer) for layer in layers))
    if checkpointed:
        return float(shape.num_layers * tokens * each * shape.d_model + max(blocks) + in_flight)
    return float(sum(blocks) + in_flight)


def saved_bytes_of_token(shape: TransformerConfig, lora: LoraConfig, each: int, layer: int = 0) -> int:
    """Count the bytes per token that a block saves for its backward pass.

    Under LoRA it does not save the input of a layer without an adapter, but it saves the values between the two
    matrices of an adapter.
    """
    trained = _trained_layers(shape, lora, layer)
    between = lora.rank * len(trained)
    return each * (between + _of_attention(shape, trained)) + _bytes_of_feed_forward(shape, lora, trained, each, layer)


def forward_bytes(shape: TransformerConfig, tokens: int, each: int) -> float:
    """Count the peak of a forward pass without gradient: attention, with rotation in float32, or feed-forward."""
    width, key_value = shape.attention_width, shape.num_kv_heads * shape.head_dim
    attention = each * (shape.d_model + 2 * width + 2 * key_value) + 3 * FLOAT32 * width
    inner = max(_inner_numbers(shape, layer) for layer in range(shape.num_layers))
    feed_forward = each * (2 * shape.d_model + inner)
    return tokens * max(attention, feed_forward)


def logits_bytes(shape: TransformerConfig, tokens: int, each: int) -> float:
    """Count the learner's logits: a chunk in the policy's precision and in float32, and the chunks that are kept."""
    # Imported here because it imports torch, which checking a recipe for CPUs does not need.
    from learner.model.scoring import MAX_KEPT_GPU, MAX_LOGITS_GPU

    logits = tokens * shape.vocab_size
    return min(logits, MAX_LOGITS_GPU) * (each + FLOAT32) + min(logits, MAX_KEPT_GPU) * FLOAT32


def _trained_layers(shape: TransformerConfig, lora: LoraConfig, layer: int) -> set[str]:
    """Return the linear layers of a block that have a gradient."""
    there = set(shape.linear_layers(layer))
    return there & set(lora.targets) if lora.rank else there


def _of_attention(shape: TransformerConfig, trained: set[str]) -> int:
    """Count the numbers that attention saves per token.

    These are the residual stream before and after its norm, queries, keys, values and the output. With a norm on them,
    queries and keys before it too. With a block-causal mask, also the output in token order.
    """
    queries, key_value = shape.attention_width, shape.num_kv_heads * shape.head_dim
    of_norms = (queries + key_value) * shape.qk_norm
    in_order = queries * (shape.is_block_causal and "out_proj" in trained)
    stream = shape.d_model * (1 + bool(trained & {"q_proj", "k_proj", "v_proj"}))
    return stream + 2 * queries + 2 * key_value + of_norms + in_order


def _bytes_of_feed_forward(shape: TransformerConfig, lora: LoraConfig, trained: set[str], each: int, layer: int) -> int:
    """Count the bytes that the feed-forward saves per token.

    These are the residual stream before and after its norm, gate, up, the activated gate, and the product. For each
    expert of a token also its input and output. For the router its input in float32, scores, weights twice and their
    sum, and three indices.
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
    """Count the numbers that a feed-forward holds per token at a time: gate and up.

    For each expert: its input, gate and up, the activated gate, their product, and its output.
    """
    moe = shape.experts_of(layer)
    if moe is None:
        return 2 * shape.mlp_hidden_size
    return moe.experts_per_token * (2 * shape.d_model + 4 * moe.expert_width)


def _trained_of_block(shape: TransformerConfig, layer: int) -> int:
    sizes, moe = shape.linear_layers(layer), shape.experts_of(layer)
    biases = sum(sizes[name][1] for name in ("q_proj", "k_proj", "v_proj")) * shape.qkv_bias
    norms = 2 * shape.d_model + 2 * shape.head_dim * shape.qk_norm
    experts = 0 if moe is None else moe.num_parameters(shape.d_model)
    return sum(inputs * outputs for inputs, outputs in sizes.values()) + experts + biases + norms
