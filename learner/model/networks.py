"""The network of each family: `Transformer` as it stands, or with the family's own way to predict or to attend."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from learner.model.config import Family, TransformerConfig
from learner.model.transformer import Pattern, Transformer


class Dream(Transformer):
    """A transformer whose output at a slot predicts the slot after it."""

    def predicting_columns(self, columns_BQ: Tensor) -> Tensor:
        """The columns before the asked ones. The first column, before which there is none, predicts itself."""
        return (columns_BQ - 1).clamp(min=0)


class BlockCausal(Transformer):
    """A transformer whose slots see their own block and all before it, the prompt's included (block diffusion, arXiv
    2503.09573; SDAR, arXiv 2510.06303). Blocks are counted from the first column of a canvas, not from a prompt's end.
    """

    is_cache_exact: ClassVar[bool] = True

    def pattern(self, lengths_B: Tensor | None, block_lengths_B: Tensor | None = None) -> Pattern:
        """A used slot of the row that is in no later block."""
        of_all = self.config.block_length
        assert of_all is not None, "the config of a block-causal family has one"

        def is_seen(row: Tensor, query: Tensor, column: Tensor) -> Tensor:
            length = of_all if block_lengths_B is None else block_lengths_B[row]
            is_before = column // length <= query // length
            return is_before if lengths_B is None else is_before & (column < lengths_B[row])

        return is_seen


NETWORKS: dict[Family, type[Transformer]] = {
    "llada": Transformer,
    "dream": Dream,
    "sdar": BlockCausal,
    "sdar_moe": BlockCausal,
    "llada2_moe": BlockCausal,
}


def make_model(config: TransformerConfig) -> Transformer:
    """A network of the config's family. It has no weights worth the name: load some, or `init_weights`."""
    return NETWORKS[config.family](config)


def make_on_meta(config: TransformerConfig) -> Transformer:
    """The same on the meta device: names, shapes and types, and no memory."""
    with torch.device("meta"):
        return make_model(config)


def held_dtypes(config: TransformerConfig, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """In what a policy that is cast to `dtype` holds each of its parameters: a router's bias stays in float32."""
    return {name: parameter.dtype for name, parameter in make_on_meta(config).to(dtype).named_parameters()}
