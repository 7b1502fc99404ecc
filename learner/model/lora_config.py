"""What of a policy is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, field_validator, model_validator

from learner.model.config import TransformerConfig

TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a block."""


BaseWeights = Literal["full", "nf4"]
"""How the frozen weights beside an adapter are held."""


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
    """Which linear layers of each block have one; of experts the shared one's. (d1 lists seven by other models' names,
    and so adapts `q_proj`, `k_proj`, `v_proj` and `up_proj`.)"""

    base_weights: BaseWeights = "full"
    """How the learner holds the frozen linear layers of the blocks: as they are, or in 4 bits (QLoRA, arXiv 2305.14314;
    needs the extra `d1[quantized]`), a seventh of the memory, whole on every worker. The policy is then the rounded
    weights with the adapters beside them, for samplers and service too: they round what they load, and hold it in
    `rollout.engine.dtype`."""

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

    def refusal(self, policy: TransformerConfig) -> str | None:
        """Why a policy cannot be trained so; None where it can."""
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
        """What B A is multiplied by."""
        return self.alpha / self.rank


WHOLE = LoraConfig()
"""No adapter: every parameter is trained."""
