"""QLoRA: frozen linear layers in 4-bit NF4 (arXiv 2305.14314), by bitsandbytes.

Each group of 64 weights is stored as a float32 scale, its largest magnitude, and 64 indices into sixteen fixed values:
4.5 bits a weight. QLoRA's optional quantisation of the scales is not used. So rounding a rounded weight again does not
change it, and a resumed run has a policy that is bit-identical to that of the interrupted run.

The 4-bit weights are buffers, which FSDP does not shard: every worker holds all of them, and shards the rest.

Shape letters: B rows, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from learner.model.quantization.layers import replace_linear_layers
from learner.model.transformer import Transformer

_BLOCK = 64


class Nf4Linear(nn.Module):
    """Frozen linear layer with its weight in 4-bit NF4."""

    packed: Tensor
    """[I * O / 2, 1] uint8: two indices from 0 to 15 in each byte."""
    scales: Tensor
    """[I * O / 64] float32: the largest magnitude of each group of 64 weights."""
    values: Tensor
    """[16] float32, from -1 to 1: the value of each index, before it is multiplied by the scale."""

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        """Quantize the weight of `linear` on a device; a bias stays on its own.

        For a weight on the meta device, the buffers are empty until `load`.
        """
        super().__init__()
        weight_OI = linear.weight
        self.shape = weight_OI.shape
        self.bias = linear.bias
        parts = (weight_OI.new_empty(0),) * 3 if weight_OI.is_meta else _quantize(weight_OI, device)
        for name, tensor in zip(("packed", "scales", "values"), parts, strict=True):
            # Not persistent: checkpoints hold the policy's weights, not their quantized form.
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., I] to [..., O]."""
        product: Tensor = _Nf4Matmul.apply(x, self)
        return product if self.bias is None else product + self.bias

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        """Dequantize the weight [O, I]."""
        return _dequantize((self.packed, self.scales, self.values), self.shape, dtype)

    def load(self, weight_OI: Tensor, device: torch.device) -> None:
        """Replace the weight by another one, quantized on a device."""
        self.packed, self.scales, self.values = _quantize(weight_OI, device)


class _Nf4Matmul(torch.autograd.Function):
    """x W^T; the backward pass dequantizes W again, as autograd would keep the dequantized weight of every layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight_as(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.weight_as(grad.dtype), None


def quantize_blocks(model: Transformer, device: torch.device) -> None:
    """Quantize the weights of all linear layers of the blocks to 4 bits, in place; adapters do not change.

    The results are on `device`. Only one unquantized layer at a time is copied there, as the whole model may not fit.
    """
    replace_linear_layers(model, lambda linear: Nf4Linear(linear, device))


def linear_layers(model: Transformer) -> dict[str, nn.Linear]:
    """Return the linear layers of the blocks by plain name: those that `nf4` quantizes."""
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {name.removesuffix(".base_layer"): layer for name, layer in layers if name.startswith("blocks.")}


@torch.no_grad()
def set_dequantized(linear: nn.Linear, weight_OI: Tensor) -> None:
    """Set a layer's weight to the dequantized NF4 form of `weight_OI`, in place and in the layer's precision.

    A learner with `base_weights: nf4` computes with this weight. As there, it is rounded from its stored precision.
    """
    device, dtype = linear.weight.device, linear.weight.dtype
    linear.weight.copy_(_dequantize(_quantize(weight_OI, device), weight_OI.shape, dtype))


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, Nf4Linear]]:
    """Yield the 4-bit layers, with their names in the module."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Nf4Linear))


def _quantize(weight_OI: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a weight: return the packed indices, the scales, and the sixteen values.

    This runs on the device that holds the results, as other devices may round a tie the other way.
    """
    whole = weight_OI.detach().to(device).contiguous()
    packed, state = _bitsandbytes().quantize_4bit(whole, blocksize=_BLOCK, quant_type="nf4")
    return packed, state.absmax, state.code


def _dequantize(parts: tuple[Tensor, Tensor, Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Dequantize a result of `_quantize` to [O, I]."""
    functional, (packed, scales, values) = _bitsandbytes(), parts
    state = functional.QuantState(
        absmax=scales, shape=shape, code=values, blocksize=_BLOCK, quant_type="nf4", dtype=dtype
    )
    whole: Tensor = functional.dequantize_4bit(packed, state)
    return whole


def _bitsandbytes() -> Any:
    """Import the functions of bitsandbytes. Raises ValueError if the package is missing."""
    try:
        from bitsandbytes import functional
    except ModuleNotFoundError as error:
        raise ValueError(
            "a policy with model.lora.base_weights nf4 needs the package bitsandbytes; pip install 'd1[quantized]'"
        ) from error
    return functional
