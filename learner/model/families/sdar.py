"""The SDAR family: its config keys, its weight names, and the ids that its configs leave to other files.

A Qwen3 whose slots see their whole block, and all blocks before it (arXiv 2510.06303; `modeling_sdar.py` of the
published checkpoints). Checkpoints of TraDo, DiRL and LightningRL are of this architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from learner.model.config import Family, TransformerConfig
from learner.model.families.ids import read_ids
from learner.model.families.raw_config import RawConfig
from learner.model.families.rotary import read_rotary, write_rotary
from learner.model.moe.config import MoEConfig

MODEL_TYPE = "sdar"

OUTER_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
BLOCK_PREFIX = "model.layers"
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.out_proj": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
# What most published checkpoints were trained with; where it is another, it is in their name and nowhere else.
_BLOCK_LENGTH = 4
_MASK = "<|MASK|>"
# What SDAR's config must say, if it says anything, for our transformer to be the same function.
FIXED_DEFAULTS: dict[str, Any] = {
    "architectures": ["SDARForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "use_sliding_window": False,
}


def read_config(raw: RawConfig) -> TransformerConfig:
    """Our config from an SDAR checkpoint's, and from its tokenizer and `generation_config.json` where it says less.

    Raises:
        ValueError: a key is missing, or asks for a variant that our transformer does not compute.
    """
    return read_config_of(raw, "sdar", FIXED_DEFAULTS, None)


def read_config_of(
    raw: RawConfig, family: Family, fixed: Mapping[str, Any], moe: MoEConfig | None
) -> TransformerConfig:
    """The same for a form of SDAR: what its config must say, if it says anything, and its experts."""
    raw.check(fixed, may_lack=True)
    vocab_size = raw["vocab_size"]
    return TransformerConfig(
        family=family,
        vocab_size=vocab_size,
        d_model=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw.get("num_key_value_heads", raw["num_attention_heads"]),
        head_width=raw["head_dim"],
        mlp_hidden_size=raw["intermediate_size"],
        moe=moe,
        max_sequence_length=raw["max_position_embeddings"],
        qk_norm=True,
        block_length=raw.get("block_size", _BLOCK_LENGTH),
        tied_embeddings=raw.get("tie_word_embeddings", False),
        rope_theta=read_rotary(raw).theta,
        rms_norm_eps=raw["rms_norm_eps"],
        **read_ids(raw, vocab_size, mask_token=_MASK),
    )


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` that SDAR's original code reads."""
    return {
        "model_type": MODEL_TYPE,
        **FIXED_DEFAULTS,
        **write_rotary(config),
        "block_size": config.block_length,
        "bos_token_id": config.eos_token_id,
        "eos_token_id": config.eos_token_id,
        "fuse_cross_entropy": True,
        "head_dim": config.head_dim,
        "hidden_size": config.d_model,
        "initializer_range": 0.02,
        "intermediate_size": config.mlp_hidden_size,
        "mask_token_id": config.mask_token_id,
        "max_position_embeddings": config.max_sequence_length,
        "max_window_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "sliding_window": None,
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": False,
        "vocab_size": config.vocab_size,
    }
