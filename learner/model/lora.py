"""LoRA: low-rank adapters of frozen linear layers, W x + alpha / rank * B A x (arXiv 2106.09685).

The targets are linear layers of the blocks only. Targets have our names, anchored to the blocks: in LLaDA's own names
`ff_out` is both a layer of every block and the head. Of experts, only the shared one has adapters.

Adapters are not merged while a policy is trained, sampled from or served. In bfloat16, merging rounds most of an early
adapter away: a weight of 0.02 has a spacing of 1e-4, and the first rounds move it by 1e-6. The importance ratio
compares the learner's likelihood with the sampler's, so both must compute the same function: the base, with the same
unmerged adapters. There is no dropout for the same reason.

A layer has up to two adapters: the trained one, and the frozen `start`, the sum of those of the run's earlier stages.

Shape letters: N tokens, I inputs and O outputs of a layer, R rank.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from learner.model.lora_config import TARGETS, LoraConfig
from learner.model.quantization.fp8 import Fp8Linear
from learner.model.quantization.nf4 import Nf4Linear
from learner.model.transformer import Transformer

_A, _B = ".lora_A.weight", ".lora_B.weight"


class AdaptedLinear(nn.Module):
    """Frozen linear layer with its LoRA adapters."""

    start_A: Tensor | None  # noqa: N815 - peft's names of the two matrices
    """[R', I] A of the frozen adapter; None without one."""
    start_B: Tensor | None  # noqa: N815
    """[O, R'] B of the frozen adapter; None without one."""

    def __init__(self, base_layer: nn.Linear, rank: int, scaling: float, dtype: torch.dtype = torch.float32) -> None:
        """Wrap a layer with an uninitialized adapter, on the layer's device.

        Args:
            base_layer: the frozen layer.
            rank: R.
            scaling: multiplier of B A.
            dtype: type of the adapter: float32 if it is trained.
        """
        super().__init__()
        device = base_layer.weight.device
        self.base_layer: nn.Linear | Nf4Linear = base_layer
        self.lora_A = nn.Parameter(torch.empty(rank, base_layer.in_features, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.empty(base_layer.out_features, rank, dtype=dtype, device=device))
        # Buffers: FSDP does not shard them, so every worker holds them whole. They are not part of any checkpoint.
        self.register_buffer("start_A", None, persistent=False)
        self.register_buffer("start_B", None, persistent=False)
        self.scaling, self.start_scaling = scaling, 0.0
        self.is_disabled = False
        """Whether the trained adapter is skipped: then this is the policy at the beginning of the stage."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., I] to [..., O], in the precision of x."""
        if torch.is_grad_enabled():
            trained = (None, None) if self.is_disabled else (self.lora_A, self.lora_B)
            product: Tensor = _LoraFunction.apply(x, *trained, self)
            return product
        return self.run(x)[0]

    def run(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute `forward`'s output, and [N, R] A x of the trained adapter, without derivatives.

        Products are accumulated smallest first, so that in bfloat16 only sums are rounded. If W x were rounded before
        an adapter is added, as in peft, an early adapter would be lost: it is below half of the last bit of W x.
        """
        x_NI, sum_NO, down_NR = x.flatten(0, -2), None, None
        for a_RI, b_OR, scaling in self.pairs():
            down = x_NI @ a_RI.to(x.dtype).T
            sum_NO = _addmm(sum_NO, down, b_OR.to(x.dtype).T, scaling)
            down_NR = down if a_RI is self.lora_A else down_NR
        if isinstance(self.base_layer, Fp8Linear):
            wide_NO = self.base_layer.product(x_NI, torch.float32)
            sum_NO = (wide_NO if sum_NO is None else wide_NO.add_(sum_NO)).to(x.dtype)
            product = sum_NO.view(*x.shape[:-1], self.base_layer.out_features)
            return product if self.base_layer.bias is None else product.add_(self.base_layer.bias), down_NR
        weight_IO = _weight(self.base_layer, x.dtype).T
        # Not a view: autograd forbids in-place writes to a view that a custom function returns.
        product = x.new_empty(*x.shape[:-1], weight_IO.shape[1])
        _addmm(sum_NO, x_NI, weight_IO, out=product.flatten(0, -2))
        return product if self.base_layer.bias is None else product.add_(self.base_layer.bias), down_NR

    def pairs(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield A, B and scaling of each active adapter. The trained one comes first, as it starts small."""
        if not self.is_disabled:
            yield self.lora_A, self.lora_B, self.scaling
        if self.start_A is not None and self.start_B is not None:
            yield self.start_A, self.start_B, self.start_scaling

    @torch.no_grad()
    def copy_adapter_(self, a_RI: Tensor, b_OR: Tensor, scaling: float) -> None:
        """Overwrite the adapter in place, so that recorded CUDA graphs stay valid.

        Raises ValueError if the shapes differ.
        """
        if a_RI.shape != self.lora_A.shape or b_OR.shape != self.lora_B.shape:
            raise ValueError(
                f"an adapter of shapes {list(a_RI.shape)} and {list(b_OR.shape)} does not fit one of "
                f"{list(self.lora_A.shape)} and {list(self.lora_B.shape)}"
            )
        self.lora_A.copy_(a_RI)
        self.lora_B.copy_(b_OR)
        self.scaling = scaling

    def set_start_adapter(self, a_RI: Tensor | None, b_OR: Tensor | None, scaling: float) -> None:
        """Set the frozen adapter; None removes it. The tensors are not copied."""
        self.start_A, self.start_B, self.start_scaling = a_RI, b_OR, scaling


def add_adapters(model: Transformer, config: LoraConfig) -> None:
    """Freeze a policy and add an adapter to each target of each block, in place; `fresh_adapter` fills them."""
    model.requires_grad_(False)
    for name in adaptable_layers(model, config.targets):
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), "no adapter has been put there yet"
        # Trained parameters are in float32, whatever the precision of the frozen weight.
        model.set_submodule(name, AdaptedLinear(linear, config.rank, config.scaling))


def adaptable_layers(model: Transformer, targets: Sequence[str] = TARGETS) -> list[str]:
    """List the names of the linear layers that can have an adapter: the targets in each block."""
    pattern = re.compile(rf"blocks\.\d+\.(attn|mlp|mlp\.shared)\.({'|'.join(targets)})")
    return [name for name, _ in model.named_modules() if pattern.fullmatch(name)]


def set_adapter(model: Transformer, matrices: Mapping[str, Tensor], scaling: float) -> None:
    """Set the adapter of a policy for inference, in place and in the policy's precision.

    Raises ValueError if it does not fit the policy, or has another shape than an adapter already set.
    """
    for name, (a_RI, b_OR) in _by_layer(matrices).items():
        layer = _submodule(model, name)
        if isinstance(layer, nn.Linear):
            if (layer.out_features, layer.in_features) != (b_OR.shape[0], a_RI.shape[1]):
                raise ValueError(
                    f"its matrices for {name} are {list(b_OR.shape)} and {list(a_RI.shape)}, and the weight is "
                    f"{list(layer.weight.shape)}"
                )
            layer = AdaptedLinear(layer, a_RI.shape[0], scaling, layer.weight.dtype).requires_grad_(False)
            model.set_submodule(name, layer)
        layer.copy_adapter_(a_RI, b_OR, scaling)


def set_start_adapter(
    model: Transformer, matrices: Mapping[str, Tensor], scaling: float, device: torch.device, dtype: torch.dtype
) -> None:
    """Set the frozen `start` adapter, unsharded. Without matrices it is removed.

    Args:
        model: a policy that has an adapter at each of these layers.
        matrices: A and B by plain name.
        scaling: multiplier of B A.
        device: device on which the policy computes.
        dtype: precision in which it computes.

    Raises ValueError if a layer has no adapter.
    """
    layers, found = adapted_layers(model), _by_layer(matrices)
    if unknown := found.keys() - layers.keys():
        raise ValueError(f"an earlier stage adapted {min(unknown)}, which has no adapter now: keep model.lora.targets")
    for name, layer in layers.items():
        pair = found.get(name)
        a_RI, b_OR = (None, None) if pair is None else (matrix.to(device, dtype, copy=True) for matrix in pair)
        layer.set_start_adapter(a_RI, b_OR, scaling)


def copy_sharing_base(model: Transformer) -> Transformer:
    """Copy a policy, sharing its base and its `start` adapter: only the trained adapter is copied."""
    shared = [*model.buffers(), *(part for name, part in model.named_parameters() if not is_adapter(plain_name(name)))]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    """Return the layers that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}


def fresh_adapter(shapes: Mapping[str, torch.Size], seed: int) -> dict[str, Tensor]:
    """Initialize an adapter that changes nothing yet: A [R, I] uniform in ±1 / sqrt(I) as peft's, B [O, R] zero."""
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
    """Return a parameter's name without wrappers.

    Adapter matrices end in `.lora_A.weight` and `.lora_B.weight`, as in peft's files.
    """
    name = name.replace(".base_layer.", ".")
    return f"{name}.weight" if name.endswith((".lora_A", ".lora_B")) else name


def is_adapter(name: str) -> bool:
    """Whether a plain name denotes an adapter's matrix."""
    return name.endswith((_A, _B))


def adapter_names(name: str) -> tuple[str, str]:
    """Return the plain names of the matrices A and B that an adapter of the weight `name` has."""
    layer = name.removesuffix(".weight")
    return layer + _A, layer + _B


def merge_weight(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scaling: float) -> Tensor:
    """Compute the merged weight, W + scaling * B A."""
    return torch.addmm(weight_OI, b_OR, a_RI, alpha=scaling)


@torch.no_grad()
def merge_adapters(model: Transformer) -> None:
    """Merge all adapters into the weights, in place and in their precision. Exports use float32."""
    for layer in adapted_layers(model).values():
        linear = layer.base_layer
        assert isinstance(linear, nn.Linear), "what holds 4 bits is trained, and not exported"
        for a_RI, b_OR, scaling in layer.pairs():
            linear.weight.copy_(merge_weight(linear.weight, a_RI, b_OR, scaling))
    remove_adapters(model)


def remove_adapters(model: Transformer) -> None:
    """Remove all adapters, in place. The frozen weights stay."""
    for name, layer in adapted_layers(model).items():
        model.set_submodule(name, layer.base_layer)


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Skip the trained adapters in a `with` block: the policy is exactly that of the stage's beginning."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.is_disabled = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_disabled = False


def _by_layer(matrices: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Group A and B by layer. Raises ValueError if one is missing."""
    layers = sorted({name.rpartition(".lora_")[0] for name in matrices})
    if missing := [name for layer in layers for name in adapter_names(layer) if name not in matrices]:
        raise ValueError(f"it lacks {missing[0]}")
    return {layer: (matrices[layer + _A], matrices[layer + _B]) for layer in layers}


def _submodule(model: nn.Module, name: str) -> nn.Linear | AdaptedLinear:
    """Return the linear layer of that name, adapted or not. Raises ValueError if there is none."""
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        layer = None
    if not isinstance(layer, nn.Linear | AdaptedLinear):
        raise ValueError(f"it has matrices for {name}, which is no linear layer of this policy")
    return layer


class _LoraFunction(torch.autograd.Function):
    """Forward and backward pass of `AdaptedLinear`.

    The matrix product that computes W x adds it to B A x, and the backward pass accumulates the derivatives by x in the
    same way. So an adapter adds no pass over activations. (peft scales and adds in separate passes.)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, a_RI: Tensor | None, b_OR: Tensor | None, layer: AdaptedLinear) -> Tensor:
        ctx.base, ctx.scaling, ctx.start_scaling = layer.base_layer, layer.scaling, layer.start_scaling
        product, down_NR = layer.run(x)
        ctx.save_for_backward(x, a_RI, b_OR, down_NR, layer.start_A, layer.start_B)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, a_RI, b_OR, down_NR, start_A, start_B = ctx.saved_tensors
        grad_NO, grad_a_RI, grad_b_OR, parts = grad.flatten(0, -2), None, None, []
        if a_RI is not None:
            grad_down_NR = _addmm(None, grad_NO, b_OR.to(grad.dtype), ctx.scaling)
            grad_a_RI = grad_down_NR.T @ x.flatten(0, -2)
            grad_b_OR = _addmm(None, grad_NO.T, down_NR, ctx.scaling)
            parts.append((grad_down_NR, a_RI))
        if not ctx.needs_input_grad[0]:
            return None, grad_a_RI, grad_b_OR, None
        if start_A is not None:
            parts.append((_addmm(None, grad_NO, start_B.to(grad.dtype), ctx.start_scaling), start_A))
        grad_x_NI = grad_NO @ _weight(ctx.base, grad.dtype)
        for down, matrix_RI in parts:
            torch.addmm(grad_x_NI, down, matrix_RI.to(grad.dtype), out=grad_x_NI)
        return grad_x_NI.view(x.shape), grad_a_RI, grad_b_OR, None


def _addmm(
    sum_NO: Tensor | None, left: Tensor, right: Tensor, scaling: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """Compute sum_NO + scaling * left @ right in one kernel; a `sum_NO` of None is zero."""
    if sum_NO is None and scaling == 1:
        return torch.mm(left, right, out=out)
    # With a beta of 0, `addmm` does not read its first argument.
    sum_NO, beta = (left.new_empty(()), 0) if sum_NO is None else (sum_NO, 1)
    return torch.addmm(sum_NO, left, right, beta=beta, alpha=scaling, out=out)


def _weight(base: nn.Linear | Nf4Linear, dtype: torch.dtype) -> Tensor:
    """Return the frozen weight [O, I]. It is not saved for the backward pass: FSDP gathers it again, 4 bits are
    dequantized again."""
    return base.weight_as(dtype) if isinstance(base, Nf4Linear) else base.weight.to(dtype)
