"""The shape of a feed-forward sublayer of experts."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt, model_validator


class MoEConfig(BaseModel):
    """Experts, and how a token's are chosen and weighed."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    num_experts: PositiveInt
    """Experts of a layer."""
    experts_per_token: PositiveInt
    """How many of them a token takes."""
    expert_width: PositiveInt
    """Inner width of an expert's SwiGLU."""
    router: Literal["softmax", "sigmoid"]
    """What makes a score of an expert's logit. Of softmax scores the best are taken (Qwen3, arXiv 2505.09388); of
    sigmoid scores those that are best with a bias of each expert, which moves the choice and not the weight
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    is_normalised: bool = True
    """Whether a token's weights are its scores over their sum, and not the scores."""
    num_groups: PositiveInt = 1
    """Groups of neighbours that the experts are in. A group counts as its two best experts do together."""
    kept_groups: PositiveInt = 1
    """The best so many groups have all of a token's experts."""
    scale: PositiveFloat = 1.0
    """What a token's weights are multiplied by."""
    shared_width: NonNegativeInt = 0
    """Inner width of the SwiGLU that every token takes beside its experts; 0: there is none."""
    dense_layers: tuple[NonNegativeInt, ...] = ()
    """The blocks, from 0, that have an ordinary SwiGLU instead."""

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
        """Each router comes with what its family's checkpoints can say."""
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
        """Whether each expert has a bias that moves the choice."""
        return self.router == "sigmoid"

    def products_of_token(self, width: int) -> int:
        """Multiply-adds that a token takes, without the shared SwiGLU: the router's, its experts', and their sum's."""
        return width * (self.num_experts + self.experts_per_token * (3 * self.expert_width + 1))

    def num_parameters(self, width: int) -> int:
        """Of one layer, without the shared SwiGLU and the biases: what is trained of it."""
        return width * self.num_experts * (1 + 3 * self.expert_width)
