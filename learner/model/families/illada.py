"""iLLaDA family: config keys and weight names; its mask id is in the tokenizer alone.

A Llama with bidirectional attention (arXiv 2606.25331; `modeling_illada.py` of the published checkpoints).
"""

from __future__ import annotations

from typing import Any

from learner.model.config import TransformerConfig
from learner.model.families import dream
from learner.model.families.ids import read_ids
from learner.model.families.raw_config import RawConfig
from learner.model.families.shape import read_shape, write_shape

MODEL_TYPE = "illada"

OUTER_NAMES, BLOCK_PREFIX, BLOCK_NAMES = dream.OUTER_NAMES, dream.BLOCK_PREFIX, dream.BLOCK_NAMES
_MASK = "<[MASK]>"
# Values that iLLaDA's config must have, if it has the key, for our transformer to compute the same function.
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
    """Convert a checkpoint's config to ours, completed from its tokenizer and `generation_config.json`.

    Raises:
        ValueError: a key is missing, or requires a variant that our transformer does not compute.
    """
    raw.check(_FIXED_DEFAULTS, has_default=True)
    return TransformerConfig(
        family="illada",
        **read_shape(raw),
        mlp_hidden_size=raw["intermediate_size"],
        # The family's default is true, and transformers does not write default values.
        tied_embeddings=raw.get("tie_word_embeddings", True),
        **read_ids(raw, raw["vocab_size"], mask_token=_MASK),
    )


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Make the `config.json` that iLLaDA's original code reads, with the mask id that published ones lack."""
    return {
        "model_type": MODEL_TYPE,
        **_FIXED_DEFAULTS,
        **write_shape(config),
        "intermediate_size": config.mlp_hidden_size,
    }
