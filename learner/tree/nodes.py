"""Values and advantages of the nodes of rollout trees, and the targets of their siblings' consistency loss.

A node is the canvas at the end of a level. It is one row's own: the first that passed through it (`GroupedBatch`). Its
parent is the row's node one level up, and the root is the group's prompt (d-TreeRPO, arXiv 2512.09675).

Shape letters: B rows, L completion slots, D levels, N scored tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.advantages import Advantage, Rewards, group_advantages
from learner.batch import GroupedBatch, first_rows, owned_nodes
from learner.objectives.units import group_softmax


def node_advantages(rewards: Rewards, node_keys_BD: Tensor, advantage: Advantage) -> Tensor:
    """Compute the advantage of each node among its siblings, [B, D] float32, from the leaves up.

    The value of a leaf is its reward, that of another node the mean of its children's.
    """
    parents_BD, is_node_BD = _parents(rewards.groups, node_keys_BD), owned_nodes(node_keys_BD)
    advantages_BD, value_B = torch.zeros(node_keys_BD.shape), rewards.total
    for level in reversed(range(node_keys_BD.shape[1])):
        is_node_B = is_node_BD[:, level]
        siblings = Rewards(
            total=value_B[is_node_B],
            parts=rewards.parts[is_node_B],
            correct=rewards.correct[is_node_B],
            groups=parents_BD[is_node_B, level],
        )
        advantages_BD[is_node_B, level] = group_advantages(siblings, advantage)
        advantages_BD[:, level] = advantages_BD[first_rows(node_keys_BD[:, level]), level]
        parents_P, parent_B = parents_BD[:, level].unique(return_inverse=True)
        sums_P, counts_P = (
            torch.zeros(len(parents_P)).index_add_(0, parent_B[is_node_B], values)
            for values in (siblings.total, torch.ones_like(siblings.total))
        )
        value_B = (sums_P / counts_P)[parent_B]
    return advantages_BD


def sibling_targets(batch: GroupedBatch, level_BL: Tensor, temperature: float) -> Tensor:
    """Return the weight of each token in the consistency loss, and its target log-probability in nats, [B, L, 2].

    The target of a parent's slot is a distribution over the tokens that its better children committed there: those with
    a positive advantage, weighted by softmax(advantage / temperature). The loss is the KL divergence from the target to
    the policy, which sums over these children weight times (target log-probability - log-probability), and is a mean
    over the slots of all parents that have a target: the weights of all rows add up to 1.

    Args:
        batch: the rows, with the advantages of their nodes.
        level_BL: the level that scores each slot; -1 where none does.
        temperature: the softmax's.
    """
    assert batch.node_keys is not None
    assert batch.owns_node is not None
    assert batch.step_advantages is not None
    targets_BL2 = torch.zeros(*level_BL.shape, 2)
    parents_BD, num_targets = _parents(batch.group_ids, batch.node_keys), 0
    for level, advantage_B in enumerate(batch.step_advantages.unbind(1)):
        parents_P, parent_B = parents_BD[:, level].unique(return_inverse=True)
        is_better_B = batch.owns_node[:, level] & (advantage_B > 0)
        weight_B = group_softmax(advantage_B / temperature, parent_B, is_better_B, len(parents_P))
        rows_N, slots_N = ((level_BL == level) & (weight_B > 0)[:, None]).nonzero(as_tuple=True)
        pair_N, tokens_N = parent_B[rows_N] * batch.num_slots + slots_N, batch.completion_ids[rows_N, slots_N]
        share_N = weight_B[rows_N] / _sums(pair_N, weight_B[rows_N])
        same_N = pair_N * (batch.completion_ids.max() + 1) + tokens_N
        targets_BL2[rows_N, slots_N, 0] = share_N
        targets_BL2[rows_N, slots_N, 1] = _sums(same_N, share_N).log()
        num_targets += len(pair_N.unique())
    targets_BL2[:, :, 0] /= max(1, num_targets)
    return targets_BL2


def _parents(groups_B: Tensor, node_keys_BD: Tensor) -> Tensor:
    """Return the key of the parent of each row's node at each level, [B, D]."""
    return torch.cat((groups_B[:, None], node_keys_BD[:, :-1]), dim=1)


def _sums(keys_N: Tensor, values_N: Tensor) -> Tensor:
    """Return the sum of the values with each one's key, [N]."""
    keys_K, index_N = keys_N.unique(return_inverse=True)
    return torch.zeros(len(keys_K)).index_add_(0, index_N, values_N)[index_N]
