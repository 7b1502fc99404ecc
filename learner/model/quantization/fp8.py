"""FP8 linear layers for inference: e4m3 weights and activations (arXiv 2209.05433), each row with its own scale.

The products are accumulated in float32. A layer's weight also stays in the policy's precision, so that versions are
loaded as without FP8.

Shape letters: N rows, I inputs and O outputs of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from learner.model.elementwise import ElementwiseModule, quantized_rows
from learner.model.quantization.layers import replace_linear_layers
from learner.model.transformer import Transformer

_MIN_CAPABILITY = (8, 9)


class Fp8Linear(nn.Linear, ElementwiseModule):
    """Linear layer that computes in FP8. It has no gradient."""

    quantized: Tensor
    """[O, I] e4m3."""
    scales: Tensor
    """[1, O] float32."""

    def __init__(self, linear: nn.Linear) -> None:
        """Make an FP8 layer with the parameters of `linear`; `quantize` must follow."""
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        # Not persistent: a state dict has the policy's weights.
        self.register_buffer("quantized", torch.empty_like(self.weight, dtype=torch.float8_e4m3fn), persistent=False)
        self.register_buffer(
            "scales", self.weight.new_empty(1, linear.out_features, dtype=torch.float32), persistent=False
        )

    def quantize(self) -> None:
        """Quantize the weight anew, in place, so that recorded CUDA graphs stay valid."""
        quantized, scales_O1 = quantized_rows(self.weight.detach())
        self.quantized.copy_(quantized)
        self.scales.copy_(scales_O1.T)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., I] to [..., O], in the precision of x."""
        product = self.product(x.flatten(0, -2), x.dtype).view(*x.shape[:-1], self.out_features)
        return product if self.bias is None else product.add_(self.bias)

    def product(self, x_NI: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the product [N, O] without the bias, in bfloat16 or float32."""
        x_e4m3, scales_N1 = self.elementwise.quantized_rows(x_NI)
        if x_NI.is_cuda:
            return scaled_product(x_e4m3, self.quantized, scales_N1, self.scales, dtype)
        # PyTorch's kernel for CPUs is a thousand times as slow as this.
        product_NO = x_e4m3.float() @ self.quantized.float().T
        return product_NO.mul_(scales_N1).mul_(self.scales).to(dtype)


def scaled_product(
    x_e4m3: Tensor, quantized_OI: Tensor, scales_N1: Tensor, scales_1O: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute the product [N, O] of two e4m3 matrices with their scales, in bfloat16 or float32, by a GPU's kernel."""
    if dtype is torch.bfloat16:
        return torch._scaled_mm(x_e4m3, quantized_OI.T, scales_N1, scales_1O, out_dtype=dtype)
    # There is no kernel with scales by row and a float32 result.
    one = scales_N1.new_ones(())
    product: Tensor = torch._scaled_mm(x_e4m3, quantized_OI.T, one, one, out_dtype=torch.float32)
    return product.mul_(scales_N1).mul_(scales_1O)


@torch.no_grad()
def quantize_to_fp8(model: Transformer) -> None:
    """Make the linear layers of the blocks compute in FP8 with their current weights, in place.

    To be called again after the weights have changed. Adapters beside these layers stay in the policy's precision.

    `check_device` and `EngineConfig.incompatibility` say whether the policy can.
    """
    replace_linear_layers(model, _quantized)


def _quantized(linear: nn.Linear) -> Fp8Linear:
    in_fp8 = linear if isinstance(linear, Fp8Linear) else Fp8Linear(linear)
    in_fp8.quantize()
    return in_fp8


def check_device(device: torch.device) -> None:
    """Raise ValueError if a GPU cannot compute in FP8. CPUs compute the same in float32, which saves no time."""
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < _MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        has, needs = (".".join(map(str, one)) for one in (capability, _MIN_CAPABILITY))
        raise ValueError(
            f"fp8 needs a GPU of compute capability {needs} (L4, L40S, H100 or newer), and {name} has {has}: leave it "
            "out"
        )
