"""Levels of rollout trees: which samplers have them, and which slots a completion scores (d-TreeRPO, arXiv 2512.09675).

Shape letters: B rows, L completion slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from learner.batch import GroupedBatch
from learner.estimators.base import SamplerFacts
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


def tree_refusal(sampler: SamplerFacts, num_levels: int) -> str | None:
    """Return why completions of such a sampler are no tree; None if they are."""
    if sampler.has_varying_steps:
        return (
            "estimator.branches has levels of equally many denoise steps, and those of rollout.sampling vary: leave "
            "out threshold, factor, entropy_bound and editing_threshold"
        )
    if sampler.is_block_causal:
        return (
            "estimator.branches needs a bidirectional policy: the steps of a block-causal one depend on where its "
            "prompt ends in a block; take another learner.algorithm"
        )
    if sampler.max_denoise_steps % num_levels:
        return (
            f"estimator.branches has {num_levels} levels, and rollout.sampling {sampler.max_denoise_steps} denoise "
            f"steps; make their number a multiple of {num_levels}"
        )
    return None


def slots_of_nodes(batch: GroupedBatch, level_BL: Tensor, num_levels: int) -> Tensor:
    """Return the slots that a row scores for the nodes that it stands for, [B, L] bool.

    A node's text ends at the first stop token among those that are committed at the end of its level.
    """
    assert batch.owns_node is not None, "samplers draw a tree for such a config"
    slots_L = torch.arange(batch.num_slots, device=level_BL.device)
    scored_BL = torch.zeros_like(batch.is_stop)
    for level in range(num_levels):
        is_shown_BL = (level_BL >= 0) & (level_BL <= level)
        end_B1 = torch.where(batch.is_stop & is_shown_BL, slots_L, batch.num_slots).amin(dim=1, keepdim=True)
        is_owned_B1 = (batch.owns_node[:, level] & (batch.completion_lengths > 0))[:, None]
        scored_BL |= (level_BL == level) & (slots_L <= end_B1) & is_owned_B1
    return scored_BL
