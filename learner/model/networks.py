"""Construction of policy networks from their config."""

from __future__ import annotations

import torch

from learner.model.config import TransformerConfig
from learner.model.transformer import Transformer


def make_model(config: TransformerConfig) -> Transformer:
    """Make a network of this shape. Its weights are zeros or random: load some, or call `init_weights`."""
    return Transformer(config)


def make_meta_model(config: TransformerConfig) -> Transformer:
    """Make a network on the meta device: names, shapes and types, without memory."""
    with torch.device("meta"):
        return make_model(config)


def parameter_dtypes(config: TransformerConfig, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the type of each parameter of a policy cast to `dtype`: a router's bias stays in float32."""
    return {name: parameter.dtype for name, parameter in make_meta_model(config).to(dtype).named_parameters()}
