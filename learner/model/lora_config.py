"""LoRA configuration: rank, scaling, target layers, and quantization of the frozen weights (QLoRA)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, field_validator, model_validator

from learner.model.config import TransformerConfig

TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a block."""


BaseWeights = Literal["full", "nf4"]
"""Format of the frozen weights under an adapter: unquantized, or 4-bit NF4."""


class LoraConfig(BaseModel):
    """Trained part of the policy: all parameters, or a LoRA adapter.

    There is no dropout: with it, learner and sampler would not compute the same likelihood.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    rank: NonNegativeInt = 0
    """Rank of the adapter's matrices (d1: 128); 0 trains every parameter, without an adapter."""
    alpha: PositiveInt = 64
    """The adapter's output is multiplied by `alpha / rank` (d1: 64)."""
    targets: tuple[str, ...] = TARGETS
    """Linear layers of each block that have an adapter; of experts, only the shared one's. (d1 lists seven names of
    other models' layers, of which `q_proj`, `k_proj`, `v_proj` and `up_proj` exist.)"""

    base_weights: BaseWeights = "full"
    """Format of the learner's frozen linear layers in the blocks: unquantized, or 4-bit NF4 (QLoRA, arXiv 2305.14314;
    needs the extra `d1[quantized]`). NF4 takes a seventh of the memory, and is not sharded over the workers. The policy
    is then the rounded weights with the adapters, also for samplers and service: they round the weights that they load,
    and hold them in `rollout.engine.dtype`."""

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

    def incompatibility(self, policy: TransformerConfig) -> str | None:
        """Return an error message if a policy cannot be trained with this config; None if it can."""
        if not self.rank or policy.moe is None:
            return None
        if self.base_weights == "nf4":
            return (
                "model.lora.base_weights nf4 holds linear layers in 4 bits, and experts, most of the policy, are none"
            )
        there = [name for name in TARGETS if any(name in policy.linear_layers(i) for i in range(policy.num_layers))]
        if set(there).isdisjoint(self.targets):
            return (
                f"model.lora.targets names {', '.join(self.targets)}, and experts have no adapters; "
                f"the linear layers of this policy are {', '.join(there)}"
            )
        return None

    @property
    def scaling(self) -> float:
        """Multiplier of B A."""
        return self.alpha / self.rank


FULL_FINE_TUNING = LoraConfig()
"""Full fine-tuning: no adapter, every parameter is trained."""
