"""LoRA through peft: small matrices beside frozen ones, W x + alpha / rank * B A x (arXiv 2106.09685).

The targets are the linear layers of the blocks and nothing else: in LLaDA's own names `ff_out` is a layer of every
block and also the head, so they are ours, anchored to the blocks. Experts have none, but for the shared one.

There is no dropout, on purpose. The ratio of a policy gradient compares the likelihood that the learner computes with
the one that the sampler had, so both must be the same function of the weights; the sampler has the adapter merged.

How adapters are made, named, switched off and saved is peft's; the product is ours. B A x is added to W x by the
matrix product that computes it, and in the backward pass the two derivatives by x likewise: peft scales and adds them
in passes of their own over activations, which cost memory traffic and no arithmetic.

Shape letters: N tokens, I inputs and O outputs of a layer, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from learner.model.lora_config import LoraConfig
from learner.model.quantized import Nf4Linear
from learner.model.transformer import Transformer

_A, _B = ".lora_A.weight", ".lora_B.weight"


def add_adapters(model: Transformer, config: LoraConfig) -> None:
    """Freeze a policy and put an adapter beside each target of each block, in place; `fresh_adapter` fills them."""
    # Here and not above: it takes seconds, and a run that trains every parameter needs none of it.
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    pattern = rf"blocks\.\d+\.(attn|mlp|mlp\.shared)\.({'|'.join(config.targets)})"
    peft_config = PeftConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=pattern)
    inject_adapter_in_model(peft_config, model)
    for name, parameter in model.named_parameters():
        if is_adapter(plain_name(name)):
            # peft takes the precision of what it stands beside; what is trained is in float32.
            parameter.data = parameter.data.float()
    for layer in _adapted_layers(model):
        layer.forward = MethodType(_forward, layer)


def fresh_adapter(shapes: Mapping[str, torch.Size], seed: int) -> dict[str, Tensor]:
    """An adapter that changes nothing yet: A [R, I] uniform in ±1 / sqrt(I) as peft's, B [O, R] zero."""
    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    for name, shape in shapes.items():
        if name.endswith(_A):
            bound = shape[1] ** -0.5
            adapter[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        else:
            adapter[name] = torch.zeros(shape)
    return adapter


def plain_name(name: str) -> str:
    """A parameter's name as it is without peft's wrapping; an adapter's is its layer's, `.lora_A` or `.lora_B`."""
    return name.replace(".base_layer.", ".").replace(".default.", ".")


def is_adapter(name: str) -> bool:
    """Whether a plain name is that of an adapter's matrix."""
    return name.endswith((_A, _B))


def adapter_names(name: str) -> tuple[str, str]:
    """The plain names of the A and the B that stand beside the weight `name`, if it has an adapter."""
    layer = name.removesuffix(".weight")
    return layer + _A, layer + _B


def merged(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scaling: float) -> Tensor:
    """The weight that computes what a weight and its adapter compute: W + scaling * B A."""
    return torch.addmm(weight_OI, b_OR, a_RI, alpha=scaling)


def merged_weights(base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """Every weight with its adapter merged, if it has one; the others as they came."""
    return {name: _with_adapter(name, weight, adapter, scaling) for name, weight in base.items()}


@torch.no_grad()
def merge_into(
    model: Transformer,
    base: Mapping[str, Tensor],
    adapter: Mapping[str, Tensor],
    scaling: float,
    *,
    only_adapted: bool,
) -> None:
    """The same into a policy in place, a weight at a time, on its device; in its precision when that is done.

    `only_adapted` leaves what has no adapter as it is.
    """
    for name, parameter in model.named_parameters():
        if not only_adapted or adapter_names(name)[0] in adapter:
            parameter.copy_(_with_adapter(name, base[name], adapter, scaling))


def _with_adapter(name: str, weight: Tensor, adapter: Mapping[str, Tensor], scaling: float) -> Tensor:
    a, b = adapter_names(name)
    if a not in adapter:
        return weight
    # In the precision of the adapter, which is the learner's, whatever the base travelled in.
    device, dtype = weight.device, adapter[a].dtype
    return merged(weight.to(dtype), adapter[a].to(device), adapter[b].to(device), scaling)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within the block the policy computes what it did before it had adapters: exactly, they are not run."""
    layers = _adapted_layers(model)
    for layer in layers:
        # peft's own switch also sets `requires_grad`, which FSDP reads when it first gathers a parameter, and keeps.
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _adapted_layers(model: nn.Module) -> list[Any]:
    """The layers that peft has put around those with an adapter."""
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _forward(layer: Any, x: Tensor) -> Tensor:
    """[..., I] to [..., O]: what peft's own forward computes."""
    if layer.disable_adapters:
        off: Tensor = layer.base_layer(x)
        return off
    a_RI, b_OR = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    product: Tensor = _Adapted.apply(x, a_RI, b_OR, layer)
    return product


class _Adapted(torch.autograd.Function):
    """x W^T + scaling * x A^T B^T beside a frozen layer, computed in the precision of what that layer gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a_RI: Tensor, b_OR: Tensor, layer: Any) -> Tensor:
        ctx.base, ctx.scaling = layer.base_layer, layer.scaling["default"]
        product: Tensor = ctx.base(x)
        product_NO = product.view(-1, product.shape[-1])
        # Autocast, or a base in half precision: peft's adapter is in float32.
        down_NR = x.flatten(0, -2).to(product.dtype) @ a_RI.to(product.dtype).T
        torch.addmm(product_NO, down_NR, b_OR.to(product.dtype).T, alpha=ctx.scaling, out=product_NO)
        ctx.save_for_backward(x, a_RI, b_OR, down_NR)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        x, a_RI, b_OR, down_NR = ctx.saved_tensors
        grad_NO, x_NI = grad.flatten(0, -2), x.flatten(0, -2).to(grad.dtype)
        grad_down_NR = _scaled_product(grad_NO, b_OR.to(grad.dtype), ctx.scaling)
        grad_a_RI = grad_down_NR.T @ x_NI
        grad_b_OR = _scaled_product(grad_NO.T, down_NR, ctx.scaling)
        if not ctx.needs_input_grad[0]:
            return None, grad_a_RI, grad_b_OR, None
        grad_x_NI = grad_NO @ _weight(ctx.base, grad.dtype)
        torch.addmm(grad_x_NI, grad_down_NR, a_RI.to(grad.dtype), out=grad_x_NI)
        return grad_x_NI.view(x.shape), grad_a_RI, grad_b_OR, None


def _scaled_product(left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """The product of two matrices times a number, in one kernel."""
    # With a beta of 0 what is added to is not read.
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scaling)


def _weight(base: nn.Linear | Nf4Linear, dtype: torch.dtype) -> Tensor:
    """[O, I] the frozen weight: what FSDP has gathered anew for the backward pass, or what the 4 bits stand for."""
    return base.weight_as(dtype) if isinstance(base, Nf4Linear) else base.weight.to(dtype)
