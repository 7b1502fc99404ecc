"""Config keys of a policy's shape and ids, as in transformers' Llama and later architectures."""

from __future__ import annotations

from typing import Any

from learner.model.config import TransformerConfig
from learner.model.families.raw_config import RawConfig
from learner.model.families.rotary import read_rotary, write_rotary


def read_shape(raw: RawConfig, *, may_scale: bool = False, default_theta: float | None = None) -> dict[str, Any]:
    """Read the fields of `TransformerConfig` that all these architectures have.

    The keywords are `read_rotary`'s. Raises ValueError that names a missing key, or a rotation that d1 does not
    compute.
    """
    rotary = read_rotary(raw, may_scale=may_scale, default_theta=default_theta)
    return {
        "vocab_size": raw["vocab_size"],
        "d_model": raw["hidden_size"],
        "num_layers": raw["num_hidden_layers"],
        "num_heads": raw["num_attention_heads"],
        "num_kv_heads": raw.get("num_key_value_heads", raw["num_attention_heads"]),
        "max_sequence_length": raw["max_position_embeddings"],
        "rope_theta": rotary.theta,
        "rope_scaling": rotary.scaling,
        "rms_norm_eps": raw["rms_norm_eps"],
    }


def write_shape(config: TransformerConfig) -> dict[str, Any]:
    """Write these keys from a policy's config, with its rotary settings and its ids."""
    return {
        **write_rotary(config),
        "eos_token_id": config.eos_token_id,
        "hidden_size": config.d_model,
        "initializer_range": 0.02,
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
