"""The network of each family: `Transformer` as it stands, or with the family's own way to predict."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.model.config import Family, TransformerConfig
from learner.model.transformer import Transformer


class Dream(Transformer):
    """A transformer whose output at a slot predicts the slot after it."""

    def predicting_columns(self, columns_BQ: Tensor) -> Tensor:
        """The columns before the asked ones. The first column, before which there is none, predicts itself."""
        return (columns_BQ - 1).clamp(min=0)


NETWORKS: dict[Family, type[Transformer]] = {"llada": Transformer, "dream": Dream}


def make_model(config: TransformerConfig) -> Transformer:
    """A network of the config's family. It has no weights worth the name: load some, or `init_weights`."""
    return NETWORKS[config.family](config)


def make_on_meta(config: TransformerConfig) -> Transformer:
    """The same on the meta device: names, shapes and types, and no memory."""
    with torch.device("meta"):
        return make_model(config)
