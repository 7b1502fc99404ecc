"""Replacement of the linear layers of a policy's blocks by quantized ones."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from learner.model.transformer import Transformer


def replace_linear_layers(model: Transformer, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace each linear layer of the blocks by `make(layer)`, in place; adapters beside them do not change."""
    for block in model.blocks:
        for name, module in list(block.named_modules()):
            if isinstance(module, nn.Linear):
                block.set_submodule(name, make(module))
