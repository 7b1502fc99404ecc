"""Fast-dLLM v2 family: config keys and weight names; its mask id is in the tokenizer alone.

A block-causal Qwen2.5 whose output at a slot predicts the next one (arXiv 2509.26328; `modeling.py` of the published
checkpoints). So the last slot of a finished block predicts the first slot of the next block, as in the original
`generate`. The sub-blocks that `generate` fills in order (`small_block_size`) are a schedule of that sampler, not a
part of the network.
"""

from __future__ import annotations

from typing import Any

from learner.model.config import TransformerConfig
from learner.model.families import dream
from learner.model.families.ids import read_ids
from learner.model.families.raw_config import RawConfig
from learner.model.families.shape import read_shape, write_shape

MODEL_TYPE = "Fast_dLLM_Qwen"

OUTER_NAMES, BLOCK_PREFIX, BLOCK_NAMES = dream.OUTER_NAMES, dream.BLOCK_PREFIX, dream.BLOCK_NAMES
# The original code's default.
_BLOCK_LENGTH = 32
_MASK = "|<MASK>|"
# Values that its config must have, if it has the key, for our transformer to compute the same function.
_FIXED_DEFAULTS: dict[str, Any] = {
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "use_sliding_window": False,
}


def read_config(raw: RawConfig) -> TransformerConfig:
    """Convert a checkpoint's config to ours, completed from its tokenizer and `generation_config.json`.

    Raises:
        ValueError: a key is missing, or requires a variant that our transformer does not compute.
    """
    raw.check(_FIXED_DEFAULTS, has_default=True)
    return TransformerConfig(
        family="fast_dllm",
        **read_shape(raw),
        mlp_hidden_size=raw["intermediate_size"],
        qkv_bias=True,
        block_length=raw.get("bd_size", _BLOCK_LENGTH),
        predicts_next=True,
        tied_embeddings=raw.get("tie_word_embeddings", False),
        **read_ids(raw, raw["vocab_size"], mask_token=_MASK),
    )


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Make the `config.json` that Fast-dLLM v2's original code reads, with the mask id that published ones lack."""
    return {
        "model_type": MODEL_TYPE,
        **_FIXED_DEFAULTS,
        **write_shape(config),
        "bd_size": config.block_length,
        "intermediate_size": config.mlp_hidden_size,
        "max_window_layers": config.num_layers,
        "sliding_window": None,
    }
