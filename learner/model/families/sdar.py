"""SDAR family: config keys and weight names; some ids are in other files of the checkpoint.

A block-causal Qwen3 (arXiv 2510.06303; `modeling_sdar.py` of the published checkpoints). Checkpoints of TraDo, DiRL and
LightningRL have this architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from learner.model.config import Family, TransformerConfig
from learner.model.families.ids import read_ids
from learner.model.families.raw_config import RawConfig
from learner.model.families.shape import read_shape, write_shape
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
# The block length of most published checkpoints. Other lengths are stated only in the names of the checkpoints.
_BLOCK_LENGTH = 4
_MASK = "<|MASK|>"
# Values that SDAR's config must have, if it has the key, for our transformer to compute the same function.
FIXED_DEFAULTS: dict[str, Any] = {
    "architectures": ["SDARForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "use_sliding_window": False,
}


def read_config(raw: RawConfig) -> TransformerConfig:
    """Convert a checkpoint's config to ours, completed from its tokenizer and `generation_config.json`.

    Raises:
        ValueError: a key is missing, or requires a variant that our transformer does not compute.
    """
    return read_config_of(raw, "sdar", FIXED_DEFAULTS, None)


def read_config_of(
    raw: RawConfig, family: Family, fixed: Mapping[str, Any], moe: MoEConfig | None
) -> TransformerConfig:
    """Convert the config of a variant of SDAR, with the values that its config must have and its experts."""
    raw.check(fixed, has_default=True)
    return TransformerConfig(
        family=family,
        **read_shape(raw),
        head_width=raw["head_dim"],
        mlp_hidden_size=raw["intermediate_size"],
        moe=moe,
        qk_norm=True,
        block_length=raw.get("block_size", _BLOCK_LENGTH),
        tied_embeddings=raw.get("tie_word_embeddings", False),
        **read_ids(raw, raw["vocab_size"], mask_token=_MASK),
    )


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Make the `config.json` that SDAR's original code reads."""
    return {
        "model_type": MODEL_TYPE,
        **FIXED_DEFAULTS,
        **write_shape(config),
        "block_size": config.block_length,
        "bos_token_id": config.eos_token_id,
        "fuse_cross_entropy": True,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_hidden_size,
        "max_window_layers": config.num_layers,
        "sliding_window": None,
    }
