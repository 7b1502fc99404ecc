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
    """The `config.json` that SDAR's original code reads."""
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
