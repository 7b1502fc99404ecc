"""Rewards to advantages, within the group of completions of one problem."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

_STD_FLOOR = 1e-4


class Advantage(StrEnum):
    """How a group's rewards become advantages."""

    GROUP_MEAN = "group_mean"
    """Reward minus the group's mean (d1; Dr. GRPO, arXiv 2503.20783)."""
    GROUP_Z = "group_z"
    """... divided by the group's standard deviation (GRPO, arXiv 2402.03300)."""
    ROUND_Z = "round_z"
    """... divided by the standard deviation over the round (REINFORCE++ with a group baseline, arXiv 2501.03262):
    the step stays as large when rewards differ little, and an easy group is not blown up to weigh as much as a hard
    one."""


def group_advantages(rewards_B: Tensor, group_ids_B: Tensor, advantage: Advantage) -> Tensor:
    """Advantages [B] of rewards [B]; rows with equal group ids [B] are one group."""
    _, groups_B = group_ids_B.unique(return_inverse=True)
    num_groups = int(groups_B.max()) + 1
    counts = torch.zeros(num_groups).index_add_(0, groups_B, torch.ones_like(rewards_B))
    means = torch.zeros(num_groups).index_add_(0, groups_B, rewards_B) / counts
    centred_B = rewards_B - means[groups_B]
    if advantage is Advantage.GROUP_MEAN:
        return centred_B
    if advantage is Advantage.ROUND_Z:
        return centred_B / (centred_B.square().mean().sqrt() + _STD_FLOOR)
    variances = torch.zeros(num_groups).index_add_(0, groups_B, centred_B**2) / counts
    return centred_B / (variances.sqrt()[groups_B] + _STD_FLOOR)


def zero_variance_share(rewards_B: Tensor, group_ids_B: Tensor) -> float:
    """Share of groups whose rewards are all equal: they teach nothing."""
    spread = group_advantages(rewards_B, group_ids_B, Advantage.GROUP_MEAN).abs() > 1e-6
    num_groups = len(group_ids_B.unique())
    return 1.0 - len(group_ids_B[spread].unique()) / num_groups
