"""The policy-gradient objective on token log-probabilities. Pure functions of tensors.

Shape letters: N scored tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

Clip = Annotated[float, Field(gt=0)]


class ClippedRatioConfig(BaseModel):
    """diffu-GRPO's objective: PPO's clipped token ratio and a KL penalty (d1, arXiv 2504.12216, equation 3)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Literal["clipped_ratio"] = "clipped_ratio"
    """The objective."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The ratio is clipped below 1 - clip_low (d1: 0.5)."""
    clip_high: Clip = 0.5
    """... and above 1 + clip_high."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.04
    """Weight of the k3 estimate of KL(policy || reference); 0 needs no reference model (d1: 0.04)."""
    normalize_by: Literal["round", "micro_batch"] = "round"
    """`round` divides by the tokens of the whole round, on all workers, so that every token weighs the same however
    the round is split; `micro_batch` divides by the tokens of each micro-batch, as d1 does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTerms:
    """What the objective says of each token."""

    loss: Tensor
    """[N] to be summed and divided by a token count."""
    is_clipped: Tensor
    """[N] bool: the clip took the gradient away."""
    kl: Tensor
    """[N] k3 estimate against the reference, nats; 0 without one."""


def clipped_ratio(
    config: ClippedRatioConfig, new_N: Tensor, old_N: Tensor, reference_N: Tensor | None, advantages_N: Tensor
) -> TokenTerms:
    """PPO's pessimistic surrogate of the ratio exp(new - old), plus kl_coef * k3 (Schulman, 2020: e^d - d - 1)."""
    ratio_N = (new_N - old_N).exp()
    clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    surrogate_N = (ratio_N * advantages_N).minimum(clipped_N * advantages_N)
    kl_N = new_N.detach() * 0
    loss_N = -surrogate_N
    if reference_N is not None:
        difference_N = reference_N - new_N
        kl_N = difference_N.exp() - difference_N - 1
        loss_N = loss_N + config.kl_coef * kl_N
    return TokenTerms(loss=loss_N, is_clipped=(clipped_N * advantages_N < ratio_N * advantages_N), kl=kl_N.detach())
