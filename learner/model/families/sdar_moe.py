"""SDAR-MoE family, SDAR with mixture-of-experts layers: config keys and the weight names of its experts.

All else is as in `sdar`. The source is `modeling_sdar_moe.py` of SDAR-30B-A3B-Chat, a block-causal Qwen3-MoE (arXiv
2505.09388).
"""

from __future__ import annotations

from typing import Any

from learner.model.config import TransformerConfig
from learner.model.families import sdar
from learner.model.families.raw_config import RawConfig
from learner.model.moe.config import MoEConfig

MODEL_TYPE = "sdar_moe"

OUTER_NAMES, BLOCK_PREFIX = sdar.OUTER_NAMES, sdar.BLOCK_PREFIX
BLOCK_NAMES = sdar.BLOCK_NAMES | {"mlp.router": "mlp.gate"}
EXPERT_NAMES = {
    "mlp.experts.gate_up_proj": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp.experts.down_proj": ("mlp.experts.{}.down_proj",),
}
_FIXED_DEFAULTS = sdar.FIXED_DEFAULTS | {"architectures": ["SDARMoeForCausalLM"]}


def read_config(raw: RawConfig) -> TransformerConfig:
    """Convert an SDAR-MoE checkpoint's config to ours. Raises ValueError as `sdar.read_config`."""
    moe = MoEConfig(
        num_experts=raw["num_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["moe_intermediate_size"],
        router="softmax",
        is_normalised=raw["norm_topk_prob"],
        dense_layers=_dense_layers(raw),
    )
    return sdar.read_config_of(raw, "sdar_moe", _FIXED_DEFAULTS, moe)


def _dense_layers(raw: RawConfig) -> tuple[int, ...]:
    listed, every = raw.get("mlp_only_layers", []), raw.get("decoder_sparse_step", 1)
    if every < 1:
        raise ValueError(f"{raw.path} has decoder_sparse_step = {every}; it must be 1 or more")
    return tuple(layer for layer in range(raw["num_hidden_layers"]) if layer in listed or (layer + 1) % every)


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Make the `config.json` that SDAR-MoE's original code reads."""
    assert config.moe is not None, "a policy of this family has experts"
    return sdar.write_config(config) | {
        "model_type": MODEL_TYPE,
        **_FIXED_DEFAULTS,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.moe.dense_layers),
        "moe_intermediate_size": config.moe.expert_width,
        "norm_topk_prob": config.moe.is_normalised,
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.experts_per_token,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
