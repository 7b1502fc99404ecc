"""The Fast-dLLM v2 family: its config keys, its weight names, and the mask id that its configs leave to the tokenizer.

A Qwen2.5 whose slots see their whole block and all blocks before it, and whose output at a slot predicts the next one
(arXiv 2509.26328; `modeling.py` of the published checkpoints). So the last slot of a finished block predicts the first
slot of the next block, as in the original `generate`. The sub-blocks that it fills in order (`small_block_size`)
are a schedule of that sampler, and no part of the network.
"""

from __future__ import annotations

from typing import Any

from learner.model.config import TransformerConfig
from learner.model.families import dream
from learner.model.families.ids import read_ids
from learner.model.families.raw_config import RawConfig
from learner.model.families.rotary import read_rotary, write_rotary

MODEL_TYPE = "Fast_dLLM_Qwen"

OUTER_NAMES, BLOCK_PREFIX, BLOCK_NAMES = dream.OUTER_NAMES, dream.BLOCK_PREFIX, dream.BLOCK_NAMES
# The original code's default.
_BLOCK_LENGTH = 32
_MASK = "|<MASK>|"
# What its config must say, if it says anything, for our transformer to be the same function.
_FIXED_DEFAULTS: dict[str, Any] = {
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "use_sliding_window": False,
}


def read_config(raw: RawConfig) -> TransformerConfig:
    """Our config from a Fast-dLLM v2 checkpoint's, and from its tokenizer and `generation_config.json` where it says
    less.

    Raises:
        ValueError: a key is missing, or asks for a variant that our transformer does not compute.
    """
    raw.check(_FIXED_DEFAULTS, may_lack=True)
    vocab_size = raw["vocab_size"]
    return TransformerConfig(
        family="fast_dllm",
        vocab_size=vocab_size,
        d_model=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw.get("num_key_value_heads", raw["num_attention_heads"]),
        mlp_hidden_size=raw["intermediate_size"],
        max_sequence_length=raw["max_position_embeddings"],
        qkv_bias=True,
        block_length=raw.get("bd_size", _BLOCK_LENGTH),
        predicts_next=True,
        tied_embeddings=raw.get("tie_word_embeddings", False),
        rope_theta=read_rotary(raw).theta,
        rms_norm_eps=raw["rms_norm_eps"],
        **read_ids(raw, vocab_size, mask_token=_MASK),
    )


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` that Fast-dLLM v2's original code reads, with the mask id that it leaves out."""
    return {
        "model_type": MODEL_TYPE,
        **_FIXED_DEFAULTS,
        **write_rotary(config),
        "bd_size": config.block_length,
        "eos_token_id": config.eos_token_id,
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
