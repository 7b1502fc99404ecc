"""Configuration of a mixture-of-experts feed-forward layer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt, model_validator


class MoEConfig(BaseModel):
    """Shape of the experts, and how the router chooses and weighs those of a token."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    num_experts: PositiveInt
    """Experts of a layer."""
    experts_per_token: PositiveInt
    """Experts that each token is routed to (top-k)."""
    expert_width: PositiveInt
    """Inner width of an expert's SwiGLU."""
    router: Literal["softmax", "sigmoid"]
    """Scoring function of the experts' logits. With softmax, the highest scores are chosen (Qwen3, arXiv 2505.09388).
    With sigmoid, a bias of each expert is added for the choice, but not for the weight (DeepSeek-V3, arXiv 2412.19437,
    section 2.1.2)."""
    is_normalised: bool = True
    """Whether the scores of a token's experts are divided by their sum to give its weights."""
    num_groups: PositiveInt = 1
    """Groups of consecutive experts. The score of a group is the sum of its two best experts' scores."""
    kept_groups: PositiveInt = 1
    """Number of best groups that a token's experts are chosen from."""
    scale: PositiveFloat = 1.0
    """Multiplier of a token's weights."""
    shared_width: NonNegativeInt = 0
    """Inner width of the shared expert, a SwiGLU for all tokens; 0: there is none."""
    dense_layers: tuple[NonNegativeInt, ...] = ()
    """Indices of the blocks, from 0, that have a dense SwiGLU instead."""

    @model_validator(mode="after")
    def _groups(self) -> MoEConfig:
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_groups {self.num_groups} must divide num_experts {self.num_experts}")
        if self.num_groups > 1 and self.experts_of_group < 2:
            raise ValueError(f"num_groups {self.num_groups} leaves a group one expert; it is judged by its two best")
        if self.kept_groups > self.num_groups:
            raise ValueError(f"kept_groups {self.kept_groups} is more than num_groups {self.num_groups}")
        if self.experts_per_token > self.kept_groups * self.experts_of_group:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than the "
                f"{self.kept_groups * self.experts_of_group} experts of kept_groups {self.kept_groups}"
            )
        return self

    @model_validator(mode="after")
    def _published(self) -> MoEConfig:
        """Allow only settings that the config of the router's family can express."""
        if self.router == "softmax" and (self.num_groups > 1 or self.scale != 1 or self.shared_width):
            raise ValueError("router softmax goes with num_groups 1, scale 1 and shared_width 0, as SDAR's")
        if self.router == "sigmoid" and not self.is_normalised:
            raise ValueError("is_normalised is false; a sigmoid router's weights are normalised, as LLaDA2's")
        if self.router == "sigmoid" and self.shared_width % self.expert_width:
            raise ValueError(f"shared_width {self.shared_width} must be a multiple of expert_width {self.expert_width}")
        if self.router == "sigmoid" and self.dense_layers != tuple(range(len(self.dense_layers))):
            raise ValueError("dense_layers must be the first ones where the router is sigmoid, as LLaDA2's")
        return self

    @property
    def experts_of_group(self) -> int:
        """Experts in each group."""
        return self.num_experts // self.num_groups

    @property
    def has_bias(self) -> bool:
        """Whether each expert has a bias that is added for the choice."""
        return self.router == "sigmoid"

    def multiply_adds_per_token(self, width: int) -> int:
        """Count the multiply-adds of a token without the shared SwiGLU: router, its experts, and their weighted sum."""
        return width * (self.num_experts + self.experts_per_token * (3 * self.expert_width + 1))

    def num_parameters(self, width: int) -> int:
        """Count the trained parameters of one layer, without the shared SwiGLU; the biases are not trained."""
        return width * self.num_experts * (1 + 3 * self.expert_width)
