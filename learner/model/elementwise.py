"""Elementwise operations of a block between its matrix products, plain or each compiled to one kernel.

Plain, every addition, product and conversion of precision is a kernel of its own that reads and writes whole
activations. `fuse_elementwise` compiles the four functions below (torch.compile), which takes seconds for each kind of
input instead of minutes for the policy. Samplers and learners use the same functions. Compiled, they compute in float32
and round once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learner.model.attention.rotary import is_inference, rotate

MAX_GRAPHS = 128
"""Limit of compiled graphs of a function. They differ in gradients, precision, widths of the network, and axes of size
1. Exceeding it is an error, because a fallback to eager functions would go unnoticed."""
_E4M3 = torch.float8_e4m3fn
LARGEST_E4M3 = torch.finfo(_E4M3).max
# A row of zeros has this scale.
_SMALLEST_SCALE = 1e-12


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each vector of x [..., D] by its root mean square, and multiply it by the weight [D]."""
    if x.device.type == "cpu" and is_inference():
        # PyTorch has no fused CPU kernel: it allocates two more tensors as wide as x.
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        return (x * mean_square.add_(eps).rsqrt_()).mul_(weight)
    return F.rms_norm(x, weight.shape, weight, eps)


def norm_and_rotate(x_BHLE: Tensor, weight_E: Tensor | None, eps: float, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Normalize queries or keys per head, if there is a weight, and rotate them by their positions (`rotate`)."""
    normed = x_BHLE if weight_E is None else rms_norm(x_BHLE, weight_E, eps)
    return rotate(normed, (cos, signed_sin))


def add_and_norm(update: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `update` [..., D] to the residual stream. Returns the sum, which may overwrite `update`, and its RMSNorm."""
    # In place: no gradient needs the update before the addition. A compiled function would copy the sum back.
    x = update + residual if torch.compiler.is_compiling() else update.add_(residual)
    return x, rms_norm(x, weight_D, eps)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up, the hidden layer of SwiGLU. Without a gradient it overwrites `gate`."""
    if is_inference():
        return F.silu(gate, inplace=True).mul_(up)
    return F.silu(gate) * up


def quantized_rows(matrix_RI: Tensor) -> tuple[Tensor, Tensor]:
    """Round the rows of a matrix to e4m3. Returns the rounded numbers and their scales [R, 1] in float32."""
    wide = matrix_RI.float()
    scales_R1 = (wide.abs().amax(dim=-1, keepdim=True) / LARGEST_E4M3).clamp(min=_SMALLEST_SCALE)
    return (wide / scales_R1).to(_E4M3), scales_R1


@dataclass(frozen=True, slots=True)
class Elementwise:
    """The elementwise functions that a policy's layers call."""

    norm_and_rotate: Callable[[Tensor, Tensor | None, float, Tensor, Tensor], Tensor]
    add_and_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    gated: Callable[[Tensor, Tensor], Tensor]
    quantized_rows: Callable[[Tensor], tuple[Tensor, Tensor]]


PLAIN = Elementwise(norm_and_rotate, add_and_norm, gated, quantized_rows)


class ElementwiseModule(nn.Module):
    """A layer that calls elementwise functions."""

    elementwise: Elementwise = PLAIN


def fuse_elementwise(model: nn.Module) -> None:
    """Make the layers of a policy call compiled elementwise functions, in place. Compilation takes place at first use.

    Not for layers that are compiled as a whole, in which these functions are fused already.
    """
    set_elementwise(model, _compiled_functions())


def set_elementwise(model: nn.Module, functions: Elementwise) -> None:
    """Make the layers of a policy call these functions, in place."""
    for module in model.modules():
        if isinstance(module, ElementwiseModule):
            module.elementwise = functions


def allow_any_sizes(tensors: Iterable[Tensor]) -> None:
    """Prepare a call of a compiled function: the sizes of its inputs are symbolic from the first call on.

    The last axis of a floating-point tensor is a width of the network, which stays constant.
    """
    # Set at each call: torch 2.11 has no limit per function, and torch 2.13 has one per thread, autograd's too.
    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, list(range(tensor.ndim - tensor.is_floating_point())))


@cache
def _compiled_functions() -> Elementwise:
    """Return the compiled functions, of which all policies of a process share the graphs."""
    return Elementwise(
        norm_and_rotate=_compiled(norm_and_rotate),
        add_and_norm=_compiled(add_and_norm),
        gated=_compiled(gated),
        quantized_rows=_compiled(quantized_rows),
    )


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for tensors of any size."""
    compiled = torch.compile(function, fullgraph=True)

    def run(*args: Tensor | float | None) -> Any:
        if torch.compiler.is_compiling():
            # Within a policy that is compiled as a whole.
            return function(*args)
        allow_any_sizes(one for one in args if isinstance(one, Tensor))
        return compiled(*args)

    return run
