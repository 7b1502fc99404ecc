"""LLaDA family: config keys and weight names.

Sources are the published configs of LLaDA-8B-Base, -Instruct and LLaDA-1.5 and their modeling code (arXiv 2502.09992).
The family's network is `Transformer` without changes.
"""

from __future__ import annotations

from typing import Any

from learner.model.config import TransformerConfig
from learner.model.families.ids import read_ids
from learner.model.families.raw_config import RawConfig
from learner.model.families.rotary import read_rotary, write_rotary

MODEL_TYPE = "llada"

OUTER_NAMES = {
    "embed.weight": "model.transformer.wte.weight",
    "norm.weight": "model.transformer.ln_f.weight",
    "head.weight": "model.transformer.ff_out.weight",
}
BLOCK_PREFIX = "model.transformer.blocks"
BLOCK_NAMES = {
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
# Values that LLaDA's config must have for our transformer to compute the same function. The original code's defaults
# are GPT-2's, so these keys are required.
_FIXED: dict[str, Any] = {
    "activation_type": "silu",
    "attention_dropout": 0.0,
    "block_type": "llama",
    "embedding_dropout": 0.0,
    "layer_norm_type": "rms",
    "residual_dropout": 0.0,
    "rope": True,
}
# Optional keys: without them the original code computes what ours does.
_FIXED_DEFAULTS: dict[str, Any] = {
    "alibi": False,
    # LLaDA-MoE has the same model_type; see `llada_moe.py`.
    "architectures": ["LLaDAModelLM"],
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "clip_qkv": None,
    # Groups would change the weights' names.
    "block_group_size": 1,
    "include_bias": False,
    "input_emb_norm": False,
    "layer_norm_with_affine": True,
    "multi_query_attention": False,
    "rope_full_precision": True,
    "scale_logits": False,
}


def read_config(raw: RawConfig) -> TransformerConfig:
    """Convert a LLaDA checkpoint's config to ours.

    Raises:
        ValueError: a key is missing, or requires a variant that our transformer does not compute.
    """
    raw.check(_FIXED, has_default=False)
    raw.check(_FIXED_DEFAULTS, has_default=True)
    vocab_size = raw.get("embedding_size") or raw["vocab_size"]
    return TransformerConfig(
        family="llada",
        vocab_size=vocab_size,
        d_model=raw["d_model"],
        num_layers=raw["n_layers"],
        num_heads=raw["n_heads"],
        num_kv_heads=raw.get("n_kv_heads") or raw["n_heads"],
        mlp_hidden_size=raw.get("mlp_hidden_size") or raw["mlp_ratio"] * raw["d_model"],
        max_sequence_length=raw["max_sequence_length"],
        qkv_bias=raw.get("include_qkv_bias", False),
        tied_embeddings=raw["weight_tying"],
        rope_theta=read_rotary(raw).theta,
        rms_norm_eps=raw["rms_norm_eps"],
        **read_ids(raw, vocab_size),
    )


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Make the `config.json` that LLaDA's original code reads."""
    return {
        "model_type": MODEL_TYPE,
        **_FIXED,
        **_FIXED_DEFAULTS,
        **write_rotary(config),
        # With null, n_kv_heads decides; the original code rejects `false` with grouped heads.
        "multi_query_attention": None,
        "attention_layer_norm_with_affine": True,
        "d_model": config.d_model,
        "embedding_size": config.vocab_size,
        "eos_token_id": config.eos_token_id,
        "flash_attention": False,
        "include_qkv_bias": config.qkv_bias,
        "init_device": "cpu",
        "mask_token_id": config.mask_token_id,
        "max_sequence_length": config.max_sequence_length,
        "mlp_hidden_size": config.mlp_hidden_size,
        "n_heads": config.num_heads,
        "n_kv_heads": config.num_kv_heads,
        "n_layers": config.num_layers,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "use_cache": False,
        "vocab_size": config.vocab_size,
        "weight_tying": config.tied_embeddings,
    }
