"""The LLaDA family: its config keys and its weight names, in and out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from learner.model.transformer import TransformerConfig

MODEL_TYPE = "llada"

_OUTER_NAMES = {
    "embed.weight": "model.transformer.wte.weight",
    "norm.weight": "model.transformer.ln_f.weight",
    "head.weight": "model.transformer.ff_out.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "attn_norm",
    "attn.q_proj": "q_proj",
    "attn.k_proj": "k_proj",
    "attn.v_proj": "v_proj",
    "attn.out_proj": "attn_out",
    "mlp_norm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
# What LLaDA's config must say for our transformer to be the same function.
_FIXED: dict[str, Any] = {
    "activation_type": "silu",
    "alibi": False,
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "block_type": "llama",
    "embedding_dropout": 0.0,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "residual_dropout": 0.0,
    "rope": True,
    "scale_logits": False,
    "weight_tying": False,
}


def checkpoint_name(name: str) -> str:
    """The name that LLaDA's checkpoints give to our parameter `name`."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    _, index, inner = name.split(".", 2)
    return f"model.transformer.blocks.{index}.{_BLOCK_NAMES[inner.removesuffix('.weight')]}.weight"


def read_config(config: Mapping[str, Any]) -> TransformerConfig:
    """Our config from a checkpoint's `config.json`.

    Raises:
        ValueError: the config asks for a variant that our transformer does not compute.
    """
    for key, value in _FIXED.items():
        if config.get(key, value) != value:
            raise ValueError(f"config.json has {key} = {config[key]!r}; d1 computes LLaDA with {key} = {value!r} only")
    return TransformerConfig(
        vocab_size=config.get("embedding_size") or config["vocab_size"],
        d_model=config["d_model"],
        num_layers=config["n_layers"],
        num_heads=config["n_heads"],
        num_kv_heads=config.get("n_kv_heads") or config["n_heads"],
        mlp_hidden_size=config.get("mlp_hidden_size") or config["mlp_ratio"] * config["d_model"],
        max_sequence_length=config["max_sequence_length"],
        rope_theta=config["rope_theta"],
        rms_norm_eps=config["rms_norm_eps"],
        mask_token_id=config["mask_token_id"],
        eos_token_id=config["eos_token_id"],
        pad_token_id=config["pad_token_id"],
    )


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` that LLaDA's original code reads."""
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": MODEL_TYPE,
        **_FIXED,
        "attention_layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "d_model": config.d_model,
        "embedding_size": config.vocab_size,
        "eos_token_id": config.eos_token_id,
        "flash_attention": False,
        "init_device": "cpu",
        "layer_norm_with_affine": True,
        "mask_token_id": config.mask_token_id,
        "max_sequence_length": config.max_sequence_length,
        "mlp_hidden_size": config.mlp_hidden_size,
        "n_heads": config.num_heads,
        "n_kv_heads": config.num_kv_heads,
        "n_layers": config.num_layers,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_full_precision": True,
        "rope_theta": config.rope_theta,
        "torch_dtype": "float32",
        "use_cache": False,
        "vocab_size": config.vocab_size,
    }
