"""LoRA through peft: small matrices beside frozen ones, W x + alpha / rank * B A x (arXiv 2106.09685).

The targets are the linear layers of the blocks and nothing else: in LLaDA's own names `ff_out` is a layer of every
block and also the head, so they are ours, anchored to the blocks.

There is no dropout, on purpose. The ratio of a policy gradient compares the likelihood that the learner computes with
the one that the sampler had, so both must be the same function of the weights; the sampler has the adapter merged.

Shape letters: I inputs and O outputs of a layer, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from learner.model.lora_config import LoraConfig
from learner.model.transformer import Transformer

_A, _B = ".lora_A.weight", ".lora_B.weight"


def add_adapters(model: Transformer, config: LoraConfig) -> None:
    """Freeze a policy and put an adapter beside each target of each block, in place; `fresh_adapter` fills them."""
    # Here and not above: it takes seconds, and a run that trains every parameter needs none of it.
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    pattern = rf"blocks\.\d+\.(attn|mlp)\.({'|'.join(config.targets)})"
    peft_config = PeftConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=pattern)
    inject_adapter_in_model(peft_config, model)


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
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        # peft's own switch also sets `requires_grad`, which FSDP reads when it first gathers a parameter, and keeps.
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
