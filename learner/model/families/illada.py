"""The iLLaDA family: its config keys, its weight names, and the mask id that its configs leave to the tokenizer.

A Llama with attention to both sides (arXiv 2606.25331; `modeling_illada.py` of the published checkpoints).
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
    return TransformerConfig(
        family="illada",
        **read_shape(raw),
        mlp_hidden_size=raw["intermediate_size"],
        # transformers leaves the key out where it is true and the family's default.
        tied_embeddings=raw.get("tie_word_embeddings", True),
        **read_ids(raw, raw["vocab_size"], mask_token=_MASK),
    )


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` that iLLaDA's original code reads, with the mask id that it leaves out."""
    return {
        "model_type": MODEL_TYPE,
        **_FIXED_DEFAULTS,
        **write_shape(config),
        "intermediate_size": config.mlp_hidden_size,
    }
