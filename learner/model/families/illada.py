"""The iLLaDA family: its config keys, its weight names, and the mask id that its configs leave to the tokenizer.

A Llama with attention to both sides (arXiv 2606.25331; `modeling_illada.py` of the published checkpoints).
"""

from __future__ import annotations

from typing import Any

from learner.model.config import TransformerConfig
from learner.model.families import dream
from learner.model.families.ids import read_ids
from learner.model.families.raw_config import RawConfig
from learner.model.families.rotary import read_rotary, write_rotary

MODEL_TYPE = "illada"

OUTER_NAMES, BLOCK_PREFIX, BLOCK_NAMES = dream.OUTER_NAMES, dream.BLOCK_PREFIX, dream.BLOCK_NAMES
_MASK = "<[MASK]>"
# What iLLaDA's config must say, if it says anything, for our transformer to be the same function.
_FIXED_DEFAULTS: dict[str, Any] = {
    "architectures": ["ILLaDAForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    # With a number here, the norms are LayerNorms.
    "layer_norm_eps": None,
    "mlp_bias": False,
    "resid_pdrop": 0.0,
}


def read_config(raw: RawConfig) -> TransformerConfig:
    """Our config from an iLLaDA checkpoint's, and from its tokenizer and `generation_config.json` where it says less.

    Raises:
        ValueError: a key is missing, or asks for a variant that our transformer does not compute.
    """
    raw.check(_FIXED_DEFAULTS, may_lack=True)
    vocab_size = raw["vocab_size"]
    return TransformerConfig(
        family="illada",
        vocab_size=vocab_size,
        d_model=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        mlp_hidden_size=raw["intermediate_size"],
        max_sequence_length=raw["max_position_embeddings"],
        # transformers leaves the key out where it is true and the family's default.
        tied_embeddings=raw.get("tie_word_embeddings", True),
        rope_theta=read_rotary(raw).theta,
        rms_norm_eps=raw["rms_norm_eps"],
        **read_ids(raw, vocab_size, mask_token=_MASK),
    )


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` that iLLaDA's original code reads, with the mask id that it leaves out."""
    return {
        "model_type": MODEL_TYPE,
        **_FIXED_DEFAULTS,
        **write_rotary(config),
        "eos_token_id": config.eos_token_id,
        "hidden_size": config.d_model,
        "initializer_range": 0.02,
        "intermediate_size": config.mlp_hidden_size,
        "mask_token_id": config.mask_token_id,
        "max_position_embeddings": config.max_sequence_length,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": False,
        "vocab_size": config.vocab_size,
    }
