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
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, field_validator, model_validator
from torch import Tensor, nn

from learner.model.transformer import Transformer

TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a block."""
_A, _B = ".lora_A.weight", ".lora_B.weight"


class LoraConfig(BaseModel):
    """What of the policy is trained: everything, or an adapter of low rank.

    There is no dropout: learner and sampler would not compute the same likelihood.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    rank: NonNegativeInt = 0
    """Rank of the adapter's matrices (d1: 128); 0 trains every parameter, without an adapter."""
    alpha: PositiveInt = 64
    """The adapter's output is multiplied by `alpha / rank` (d1: 64)."""
    targets: tuple[str, ...] = TARGETS
    """Which linear layers of each block have one. (d1 lists seven by other models' names, and so adapts `q_proj`,
    `k_proj`, `v_proj` and `up_proj`.)"""

    base_weights: Literal["full", "nf4"] = "full"
    """How the frozen linear layers of the blocks are held: as they are, or in 4 bits (QLoRA, arXiv 2305.14314; needs
    the extra `d1[quantized]`), a seventh of the memory, whole on every worker. What a stage starts from is rounded to
    4 bits: the rounded policy with its adapter is what is trained, published and saved."""

    @field_validator("targets")
    @classmethod
    def _known(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [target for target in targets if target not in TARGETS]
        if unknown or not targets:
            what = f"names {', '.join(unknown)}, which no block has" if unknown else "is empty"
            raise ValueError(f"it {what}; the linear layers of a block are {', '.join(TARGETS)}")
        return targets

    @model_validator(mode="after")
    def _frozen_if_quantized(self) -> LoraConfig:
        if self.base_weights == "nf4" and not self.rank:
            raise ValueError("base_weights nf4 cannot be trained, only an adapter beside them: set rank (d1: 128)")
        return self

    @property
    def scaling(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank


WHOLE = LoraConfig()
"""No adapter: every parameter is trained."""


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
