"""Dream family: config keys, weight names, and the shift of its predictions by one slot.

Dream was initialized from an autoregressive Qwen2, whose output at a slot predicts the next one, and keeps this shift
with bidirectional attention (arXiv 2508.15487, section 3). Its modeling code returns unshifted logits, and its sampler
shifts them by one slot. Here the network shifts them (`predicts_next`): the logits at a slot predict its own token.
"""

from __future__ import annotations

from typing import Any

from learner.model.config import TransformerConfig
from learner.model.families.ids import read_ids
from learner.model.families.raw_config import RawConfig
from learner.model.families.rotary import read_rotary
from learner.model.families.shape import write_shape

MODEL_TYPE = "Dream"

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
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
# Values that Dream's config must have, if it has the key, for our transformer to compute the same function.
_FIXED_DEFAULTS: dict[str, Any] = {
    # Other networks have the same model_type, and do not shift.
    "architectures": ["DreamModel"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "use_mrope": False,
    "use_sliding_window": False,
}


def read_config(raw: RawConfig) -> TransformerConfig:
    """Convert a Dream checkpoint's config to ours.

    Raises:
        ValueError: a key is missing, or requires a variant that our transformer does not compute.
    """
    raw.check(_FIXED_DEFAULTS, has_default=True)
    vocab_size = raw["vocab_size"]
    return TransformerConfig(
        family="dream",
        predicts_next=True,
        vocab_size=vocab_size,
        d_model=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"] or raw["num_attention_heads"],
        mlp_hidden_size=raw["intermediate_size"],
        max_sequence_length=raw["max_position_embeddings"],
        qkv_bias=True,
        tied_embeddings=raw.get("tie_word_embeddings", False),
        rope_theta=read_rotary(raw).theta,
        rms_norm_eps=raw["rms_norm_eps"],
        **read_ids(raw, vocab_size, padding_is_stop=True),
    )


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Make the `config.json` that Dream's original code reads."""
    return {
        "model_type": MODEL_TYPE,
        **_FIXED_DEFAULTS,
        **write_shape(config),
        "intermediate_size": config.mlp_hidden_size,
        "sliding_window": None,
    }
