"""Families converted from autoregressive Llama, Qwen2 and Qwen3 (A2D), with bidirectional attention.

A checkpoint has the original config with another `model_type`, and tensors of the same names. dllm's Tiny-A2D and OPDLM
have this form, with full attention and without a shift. In addition to the original keys d1 reads `mask_token_id`,
`block_size` (null or absent: every slot sees every other) and `right_shift_logits` (whether the output at a slot
predicts the next one).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from learner.model.config import Family, TransformerConfig
from learner.model.families import dream, sdar
from learner.model.families.ids import read_ids
from learner.model.families.raw_config import RawConfig
from learner.model.families.shape import read_shape, write_shape

# Dream has Qwen2's names, SDAR has Qwen3's.
OUTER_NAMES, BLOCK_PREFIX = dream.OUTER_NAMES, dream.BLOCK_PREFIX
BLOCK_NAMES: Mapping[str, Mapping[str, str]] = {
    "a2d-llama": dream.BLOCK_NAMES,
    "a2d-qwen2": dream.BLOCK_NAMES,
    "a2d-qwen3": sdar.BLOCK_NAMES,
}
# dllm's class comes first: `write_config` writes it.
_ARCHITECTURES = {
    "a2d-llama": ("A2DLlamaLMHeadModel", "LlamaForCausalLM"),
    "a2d-qwen2": ("A2DQwen2LMHeadModel", "Qwen2ForCausalLM"),
    "a2d-qwen3": ("A2DQwen3LMHeadModel", "Qwen3ForCausalLM"),
}
# Values that a config must have, if it has the key, for our transformer to compute the same function.
_FIXED: dict[str, Any] = {"attention_dropout": 0.0, "hidden_act": "silu"}
_FIXED_OF: Mapping[str, dict[str, Any]] = {
    "a2d-llama": _FIXED | {"attention_bias": False, "mlp_bias": False},
    # Qwen2's code always has these biases; the config cannot turn them off.
    "a2d-qwen2": _FIXED | {"attention_bias": True, "use_mrope": False, "use_sliding_window": False},
    "a2d-qwen3": _FIXED | {"attention_bias": False, "use_sliding_window": False},
}
# The default base of the rotary frequencies in all three architectures (Llama 2).
_THETA = 10_000.0
# Mask tokens of dllm, OPDLM and others.
_MASKS = ("<|mask|>", "<|MASK|>", "<|mdm_mask|>")


def read_config(family: Family, raw: RawConfig) -> TransformerConfig:
    """Convert a checkpoint's config to ours, completed from its tokenizer and `generation_config.json`.

    Raises:
        ValueError: a key is missing, or requires a variant that our transformer does not compute.
    """
    raw.check(_FIXED_OF[family], has_default=True)
    _check_architecture(family, raw)
    return TransformerConfig(
        family=family,
        **read_shape(raw, may_scale=True, default_theta=_THETA),
        head_width=raw["head_dim"] if family == "a2d-qwen3" else raw.get("head_dim"),
        mlp_hidden_size=raw["intermediate_size"],
        qkv_bias=family == "a2d-qwen2",
        qk_norm=family == "a2d-qwen3",
        block_length=raw.get("block_size"),
        predicts_next=raw.get("right_shift_logits", False),
        tied_embeddings=raw.get("tie_word_embeddings", False),
        **read_ids(raw, raw["vocab_size"], mask_token=_MASKS),
    )


def _check_architecture(family: Family, raw: RawConfig) -> None:
    known = _ARCHITECTURES[family]
    for name in raw.get("architectures", []):
        if name not in known:
            raise ValueError(
                f"{raw.path} has {name!r} in architectures; of {family} d1 computes {known[0]!r} and {known[1]!r} only"
            )


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Make the `config.json` of the autoregressive architecture, with the keys that d1 and dllm add."""
    fixed = _FIXED_OF[config.family]
    # Left out where heads split `d_model`: some versions of transformers take a null for the width.
    head_dim = {} if config.head_width is None and config.family != "a2d-qwen3" else {"head_dim": config.head_dim}
    return {
        "model_type": config.family,
        "architectures": [_ARCHITECTURES[config.family][0]],
        **{key: value for key, value in fixed.items() if key != "use_mrope"},
        **write_shape(config),
        "block_size": config.block_length,
        "bos_token_id": config.eos_token_id,
        **head_dim,
        "intermediate_size": config.mlp_hidden_size,
        "right_shift_logits": config.predicts_next,
    }
