"""Step-level returns and generalized advantage estimation (GAE) over the steps of each completion.

A step is a segment of denoise steps: the tokens that the estimator scores in one state. Its reward and its value are
the means over its tokens (TraceRL, arXiv 2509.06949, as in dLLM-RL).

Shape letters: B rows, L completion slots, K steps of the row with the most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StepTargets(NamedTuple):
    """What the policy and the value model are trained towards."""

    advantages: Tensor
    """[B, L] float32; 0 for slots of no step."""
    returns: Tensor
    """[B, L] float32: discounted sums of rewards from each slot's step on; 0 for slots of no step."""


def outcome_rewards(rewards_B: Tensor, steps_BL: Tensor) -> Tensor:
    """Return token-level rewards [B, L] that give the completion's reward to each token of its last step."""
    return torch.where((steps_BL >= 0) & (steps_BL == steps_BL.amax(dim=1, keepdim=True)), rewards_B[:, None], 0.0)


def step_targets(values_BL: Tensor, rewards_BL: Tensor, steps_BL: Tensor, *, gamma: float, lam: float) -> StepTargets:
    """Compute the advantages and returns of all tokens.

    With gamma = lam = 1 and an outcome reward, every return is that reward, and a token's advantage is the reward minus
    the token's value.

    Args:
        values_BL: predictions at the state before each token's step.
        rewards_BL: rewards of tokens.
        steps_BL: the step of each token, ascending in time; negative for slots of no step.
        gamma: discount per step.
        lam: GAE's lambda.
    """
    is_token_BL = steps_BL >= 0
    index_BL = steps_BL.clamp(min=0)
    num_rows, num_steps = len(steps_BL), int(index_BL.max()) + 1

    def by_step(values_BL: Tensor) -> Tensor:
        sums_BK = values_BL.new_zeros(num_rows, num_steps)
        return sums_BK.scatter_add_(1, index_BL, values_BL.masked_fill(~is_token_BL, 0.0))

    counts_BK = by_step(torch.ones_like(values_BL))
    reward_BK, value_BK = (by_step(one) / counts_BK.clamp(min=1) for one in (rewards_BL, values_BL))
    # Return, value and advantage of the step after each one; 0 after the last.
    later_3BK = values_BL.new_zeros(3, num_rows, num_steps)
    later_3B = values_BL.new_zeros(3, num_rows)
    for step in reversed(range(num_steps)):
        later_3BK[:, :, step] = later_3B
        return_B, next_value_B, next_advantage_B = later_3B
        reward_B, value_B = reward_BK[:, step], value_BK[:, step]
        advantage_B = reward_B - value_B + gamma * next_value_B + gamma * lam * next_advantage_B
        this_3B = torch.stack((reward_B + gamma * return_B, value_B, advantage_B))
        later_3B = torch.where(counts_BK[:, step] > 0, this_3B, later_3B)
    return_BL, next_value_BL, next_advantage_BL = (one.gather(1, index_BL) for one in later_3BK)
    advantages_BL = rewards_BL - values_BL + gamma * next_value_BL + gamma * lam * next_advantage_BL
    return StepTargets(
        advantages=advantages_BL.masked_fill(~is_token_BL, 0.0),
        returns=(rewards_BL + gamma * return_BL).masked_fill(~is_token_BL, 0.0),
    )
