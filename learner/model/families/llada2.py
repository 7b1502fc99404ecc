"""LLaDA2 family, 2.0 and 2.1: config keys and weight names; some ids are in the tokenizer alone.

A block-causal mixture-of-experts transformer (arXiv 2512.15745, 2602.08676; `modeling_llada2_moe.py` of the published
checkpoints, which computes the same function in both).
"""

from __future__ import annotations

from typing import Any

from learner.model.config import TransformerConfig
from learner.model.families.ids import read_ids
from learner.model.families.raw_config import RawConfig
from learner.model.families.rotary import read_rotary, write_rotary
from learner.model.moe.config import MoEConfig

MODEL_TYPE = "llada2_moe"

OUTER_NAMES = {
    "embed.weight": "model.word_embeddings.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
BLOCK_PREFIX = "model.layers"
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn.q_proj": "attention.query_key_value",
    "attn.k_proj": "attention.query_key_value",
    "attn.v_proj": "attention.query_key_value",
    "attn.out_proj": "attention.dense",
    "attn.q_norm": "attention.query_layernorm",
    "attn.k_norm": "attention.key_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.shared.gate_proj": "mlp.shared_experts.gate_proj",
    "mlp.shared.up_proj": "mlp.shared_experts.up_proj",
    "mlp.shared.down_proj": "mlp.shared_experts.down_proj",
}
# The block length of all published checkpoints, which their configs do not state.
_BLOCK_LENGTH = 32
_MASK = "<|mask|>"
# Values that LLaDA2's config must have, if it has the key, for our transformer to compute the same function. (Its code
# reads neither `norm_topk_prob` nor `sliding_window`.)
_FIXED_DEFAULTS: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "hidden_act": "silu",
    "moe_router_enable_expert_bias": True,
    "norm_head": False,
    "norm_softmax": False,
    "output_dropout": 0.0,
    "score_function": "sigmoid",
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "use_sliding_window": False,
    "using_split_qkv_in_self_attention": False,
}
# Keys of LLaDA2.2, which has the same model_type and the same tensors. Its router takes the experts of a block from one
# pool, and its tokens can delete others or make room for them.
_OF_LLADA2_2 = ("expert_capacity", "delete_token_id", "split_token_id")


def read_config(raw: RawConfig) -> TransformerConfig:
    """Convert a checkpoint's config to ours, completed from its tokenizer and `generation_config.json`.

    Raises:
        ValueError: a key is missing, or requires a variant that our transformer does not compute.
    """
    raw.check(_FIXED_DEFAULTS, has_default=True)
    for key in _OF_LLADA2_2:
        if raw.get(key) is not None:
            raise ValueError(f"{raw.path} has {key} = {raw[key]!r}, so it is LLaDA2.2's; d1 computes 2.0 and 2.1 only")
    vocab_size, rotary = raw["vocab_size"], read_rotary(raw, partial_of=raw["head_dim"])
    return TransformerConfig(
        family="llada2_moe",
        vocab_size=vocab_size,
        d_model=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw.get("num_key_value_heads", raw["num_attention_heads"]),
        head_width=raw["head_dim"],
        mlp_hidden_size=raw["intermediate_size"],
        moe=_read_moe(raw),
        max_sequence_length=raw["max_position_embeddings"],
        rotary_width=rotary.width,
        qk_norm=True,
        block_length=raw.get("block_size", _BLOCK_LENGTH),
        tied_embeddings=raw.get("tie_word_embeddings", False),
        rope_theta=rotary.theta,
        rms_norm_eps=raw["rms_norm_eps"],
        **read_ids(raw, vocab_size, mask_token=_MASK, padding_is_stop=True),
    )


def _read_moe(raw: RawConfig) -> MoEConfig:
    return MoEConfig(
        num_experts=raw["num_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["moe_intermediate_size"],
        router="sigmoid",
        num_groups=raw["n_group"],
        kept_groups=raw["topk_group"],
        scale=raw["routed_scaling_factor"],
        shared_width=raw["moe_intermediate_size"] * raw.get("num_shared_experts", 0),
        dense_layers=tuple(range(raw.get("first_k_dense_replace", 0))),
    )


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Make the `config.json` of LLaDA2's original code, with the ids and block length that published ones lack."""
    moe = config.moe
    assert moe is not None, "a policy of this family has experts"
    return {
        "model_type": MODEL_TYPE,
        **_FIXED_DEFAULTS,
        **write_rotary(config),
        "block_size": config.block_length,
        "eos_token_id": config.eos_token_id,
        "first_k_dense_replace": len(moe.dense_layers),
        "head_dim": config.head_dim,
        "hidden_size": config.d_model,
        "initializer_range": 0.02,
        "intermediate_size": config.mlp_hidden_size,
        "mask_token_id": config.mask_token_id,
        "max_position_embeddings": config.max_sequence_length,
        "moe_intermediate_size": moe.expert_width,
        "n_group": moe.num_groups,
        "norm_topk_prob": True,
        "num_attention_heads": config.num_heads,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "num_shared_experts": moe.shared_width // moe.expert_width,
        "output_router_logits": False,
        "pad_token_id": config.pad_token_id,
        "partial_rotary_factor": config.rotary_dim / config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rotary_dim": config.rotary_dim,
        "routed_scaling_factor": moe.scale,
        "router_dtype": "fp32",
        "sliding_window": None,
        "tie_word_embeddings": config.tied_embeddings,
        "topk_group": moe.kept_groups,
        "use_cache": False,
        "vocab_size": config.vocab_size,
    }
