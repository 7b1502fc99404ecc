"""LLaDA-MoE family: config keys and weight names.

An OLMoE with bidirectional attention, and with queries and keys normalised over each head (arXiv 2509.24389;
`modeling_lladamoe.py` of the published checkpoints). `model_type` is LLaDA's, so `num_experts` distinguishes the two.
"""

from __future__ import annotations

from typing import Any

from learner.model.config import TransformerConfig
from learner.model.families import sdar_moe
from learner.model.families.ids import read_ids
from learner.model.families.raw_config import RawConfig
from learner.model.families.shape import read_shape, write_shape
from learner.model.moe.config import MoEConfig

MODEL_TYPE = "llada"

OUTER_NAMES, BLOCK_PREFIX, BLOCK_NAMES = sdar_moe.OUTER_NAMES, sdar_moe.BLOCK_PREFIX, sdar_moe.BLOCK_NAMES
_MASK = "<|mask|>"
# The class of the network with its head, and the class without.
_ARCHITECTURES = (["LLaDAMoEModelLM"], ["LLaDAMoEModel"])
# Values that LLaDA-MoE's config must have for our transformer to compute the same function. The key is required: the
# original code's default differs.
_FIXED: dict[str, Any] = {"qk_layernorm": True}
# Optional keys: without them the original code computes what ours does. (It does not read `norm_topk_prob`,
# `moe_router_score_function`, `routed_scaling_factor` or the groups of its router.)
_FIXED_DEFAULTS: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "hidden_act": "silu",
    "moe_router_enable_expert_bias": False,
    "shared_expert_intermediate_size": None,
}


def is_own(raw: RawConfig) -> bool:
    """Whether a config with LLaDA's `model_type` belongs to this family."""
    return raw.get("num_experts") is not None


def read_config(raw: RawConfig) -> TransformerConfig:
    """Convert a checkpoint's config to ours, completed from its tokenizer and `generation_config.json`.

    Raises:
        ValueError: a key is missing, or requires a variant that our transformer does not compute.
    """
    if raw.get("architectures", _ARCHITECTURES[0]) not in _ARCHITECTURES:
        raw.check({"architectures": _ARCHITECTURES[0]}, has_default=True)
    raw.check(_FIXED, has_default=False)
    raw.check(_FIXED_DEFAULTS, has_default=True)
    moe = _read_moe(raw)
    return TransformerConfig(
        family="llada_moe",
        **read_shape(raw),
        # Published checkpoints have no dense layer, so this width may be missing.
        mlp_hidden_size=raw.get("dense_intermediate_size", moe.expert_width),
        moe=moe,
        qk_norm=True,
        tied_embeddings=raw.get("tie_word_embeddings", False),
        **read_ids(raw, raw["vocab_size"], mask_token=_MASK, padding_is_stop=True),
    )


def _read_moe(raw: RawConfig) -> MoEConfig:
    has_experts = raw["moe_layer_freq"]
    if not isinstance(has_experts, list) or len(has_experts) != raw["num_hidden_layers"]:
        raise ValueError(
            f"{raw.path} has moe_layer_freq = {has_experts!r}; it should be a list of 0 or 1 for each of "
            f"{raw['num_hidden_layers']} layers"
        )
    return MoEConfig(
        num_experts=raw["num_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["expert_intermediate_size"],
        router="softmax",
        is_normalised=False,
        dense_layers=tuple(layer for layer, has_some in enumerate(has_experts) if has_some == 0),
    )


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Make the `config.json` that LLaDA-MoE's original code reads, with the mask id that published ones lack."""
    moe = config.moe
    assert moe is not None, "a policy of this family has experts"
    return {
        "model_type": MODEL_TYPE,
        "architectures": _ARCHITECTURES[0],
        **_FIXED,
        **_FIXED_DEFAULTS,
        **write_shape(config),
        "dense_intermediate_size": config.mlp_hidden_size,
        "expert_intermediate_size": moe.expert_width,
        "moe_layer_freq": [int(layer not in moe.dense_layers) for layer in range(config.num_layers)],
        "norm_topk_prob": moe.is_normalised,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "output_router_logits": False,
        "partial_rotary_factor": 1.0,
        "router_aux_loss_coef": 0.01,
    }
