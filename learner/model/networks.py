"""Networks from their config."""

from __future__ import annotations

import torch

from learner.model.config import TransformerConfig
from learner.model.transformer import Transformer


def make_model(config: TransformerConfig) -> Transformer:
    """A network of this shape. Its weights are zeros or noise: load some, or `init_weights`."""
    return Transformer(config)


def make_on_meta(config: TransformerConfig) -> Transformer:
    """The same on the meta device: names, shapes and types, and no memory."""
    with torch.device("meta"):
        return make_model(config)


def held_dtypes(config: TransformerConfig, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """In what a policy that is cast to `dtype` holds each of its parameters: a router's bias stays in float32."""
    return {name: parameter.dtype for name, parameter in make_on_meta(config).to(dtype).named_parameters()}
