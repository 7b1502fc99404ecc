"""The frozen linear layers of a policy in 4 bits, under LoRA: QLoRA's NF4 (arXiv 2305.14314), by bitsandbytes.

Each run of 64 weights is a float32 scale, its largest magnitude, and 64 of sixteen fixed values: 4.5 bits a weight. The
scales are not quantised again as QLoRA may: so what is rounded once stays what it is when it is rounded again, and a
resumed run has the policy that the interrupted one had, to the bit.

The 4 bits are buffers, which FSDP leaves alone: every worker holds all of them, and shards what remains.

Shape letters: B rows, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from learner.model.transformer import Transformer

_BLOCK = 64


class Nf4Linear(nn.Module):
    """A frozen linear layer, its weight in 4 bits."""

    packed: Tensor
    """[I * O / 2, 1] uint8: two numbers from 0 to 15 in each byte."""
    scales: Tensor
    """[I * O / 64] float32: the largest magnitude of each run of 64 weights."""
    values: Tensor
    """[16] float32, from -1 to 1: what the numbers stand for, times the scale."""

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        """Hold the weight of `linear` in 4 bits on a device; a bias stays where it is. Of a weight on the meta device
        nothing is held until `load`."""
        super().__init__()
        weight_OI = linear.weight
        self.shape = weight_OI.shape
        self.bias = linear.bias
        parts = (weight_OI.new_empty(0),) * 3 if weight_OI.is_meta else _rounded(weight_OI, device)
        for name, tensor in zip(("packed", "scales", "values"), parts, strict=True):
            # Checkpoints have the policy's weights, not how they are held.
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        product: Tensor = _Product.apply(x, self)
        return product if self.bias is None else product + self.bias

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        """[O, I] the weight that the 4 bits stand for."""
        return _dequantized((self.packed, self.scales, self.values), self.shape, dtype)

    def load(self, weight_OI: Tensor, device: torch.device) -> None:
        """Hold another weight, on a device."""
        self.packed, self.scales, self.values = _rounded(weight_OI, device)


class _Product(torch.autograd.Function):
    """x W^T, of which the backward pass has W anew: autograd would keep the whole weight of every layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight_as(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.weight_as(grad.dtype), None


def quantize_blocks(model: Transformer, device: torch.device) -> None:
    """Hold the weights of all linear layers of the blocks in 4 bits, in place; adapters stay as they are.

    The 4 bits are on `device`, where only one layer at a time is whole: the model itself may be too large for it.
    """
    for block in model.blocks:
        for name, module in list(block.named_modules()):
            if isinstance(module, nn.Linear):
                block.set_submodule(name, Nf4Linear(module, device))


def linear_layers(model: Transformer) -> dict[str, nn.Linear]:
    """The linear layers of the blocks by plain name: those that 4 bits hold."""
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {name.removesuffix(".base_layer"): layer for name, layer in layers if name.startswith("blocks.")}


@torch.no_grad()
def set_rounded(linear: nn.Linear, weight_OI: Tensor) -> None:
    """Set a weight to what 4 bits stand for, in place and in its precision: the weight that a learner with
    `base_weights: nf4` computes with. It is rounded from the precision that it is stored in, as there."""
    device, dtype = linear.weight.device, linear.weight.dtype
    linear.weight.copy_(_dequantized(_rounded(weight_OI, device), weight_OI.shape, dtype))


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, Nf4Linear]]:
    """The layers that are held in 4 bits, by their names in the module."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Nf4Linear))


def _rounded(weight_OI: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Two of its 4-bit numbers in each byte, the scales, and the sixteen values, rounded on the device that holds them:
    others may round a tie the other way."""
    whole = weight_OI.detach().to(device).contiguous()
    packed, state = _bitsandbytes().quantize_4bit(whole, blocksize=_BLOCK, quant_type="nf4")
    return packed, state.absmax, state.code


def _dequantized(parts: tuple[Tensor, Tensor, Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """[O, I] what `_rounded` gave stands for."""
    functional, (packed, scales, values) = _bitsandbytes(), parts
    state = functional.QuantState(
        absmax=scales, shape=shape, code=values, blocksize=_BLOCK, quant_type="nf4", dtype=dtype
    )
    whole: Tensor = functional.dequantize_4bit(packed, state)
    return whole


def _bitsandbytes() -> Any:
    """Its functions. Raises ValueError where the package is missing."""
    try:
        from bitsandbytes import functional
    except ModuleNotFoundError as error:
        raise ValueError(
            "a policy with model.lora.base_weights nf4 needs the package bitsandbytes; pip install 'd1[quantized]'"
        ) from error
    return functional
