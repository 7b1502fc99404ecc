"""FLOP of a round's updates, planned by the method's own estimator on a group of completions that fill their canvases.

They are counted as in `learner/flops.py`, and equal those that `Learner` counts on such a group.

Shape letters: B completions, L completion slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import InnerUpdate, SamplerFacts, Terms, Views, make_terms
from learner.flops import CanvasSums, forward_flops, update_flops
from learner.model.config import TransformerConfig
from learner.model.lora_config import FULL_FINE_TUNING, LoraConfig
from learner.objectives import DistillationConfig
from learner.objectives.value import value_shape
from learner.parallel.self_teacher import teacher_views
from learner.parallel.teacher import completed_texts
from learner.round import WEIGHING
from learner.tree.config import inner_nodes


def planned_flops(
    config: LearnerConfig,
    shape: TransformerConfig,
    lora: LoraConfig,
    facts: SamplerFacts,
    group: RolloutBatch,
    *,
    recomputes: bool,
) -> float:
    """Count the FLOP of all inner updates on a group, with old and reference likelihoods, or a teacher's distributions.

    `recomputes`: whether to include what activation checkpointing recomputes.
    """
    if config.filters.first_correct:
        group = group.select(slice(0, 1))
    group = as_leaves(group, config.branches)
    batch, estimator, objective = GroupedBatch.of(group), config.estimator, config.objective

    def terms(update: InnerUpdate) -> Terms:
        return make_terms(batch, shape, estimator.corrupt(batch, update, facts))

    def forward(trained: LoraConfig, canvases: CanvasSums) -> float:
        return forward_flops(shape, trained, canvases).total

    updates = _inner_updates(config)
    keys = [estimator.mask_key(update) for update in updates]
    of_key = {
        key: CanvasSums.of(terms(update).views) for key, update in reversed(list(zip(keys, updates, strict=True)))
    }
    total = sum(update_flops(shape, lora, of_key[key], recomputes=recomputes) for key in keys)
    if objective.needs_old:
        # Without those that the first step gives for free.
        total += sum(forward(lora, canvases) for key, canvases in of_key.items() if key != keys[0])
        total += (1 - 1 / config.num_minibatches) * forward(lora, of_key[keys[0]])
    if isinstance(objective, DistillationConfig):
        # An autoregressive teacher is taken to have the policy's shape, and scores each completion once in each update.
        taught = (_of_teacher(terms(update), batch, shape, objective, facts) for update in updates)
        total += sum(forward(FULL_FINE_TUNING, CanvasSums.of(views)) for views in taught)
    elif objective.needs_reference and not objective.precomputes_row_weights:
        total += sum(forward(FULL_FINE_TUNING, canvases) for canvases in of_key.values())
    if config.value is not None:
        # Its predictions at the start of the round, and an update beside each of the policy's.
        total += forward_flops(value_shape(shape), lora, of_key[keys[0]]).total
        total += sum(update_flops(value_shape(shape), lora, of_key[key], recomputes=recomputes) for key in keys)
    if objective.precomputes_row_weights:
        weighed = CanvasSums.of(terms(InnerUpdate(WEIGHING, config.inner_updates)).views)
        total += forward(lora, weighed) + forward(FULL_FINE_TUNING, weighed)
    return total


def planned_canvases(
    config: LearnerConfig, shape: TransformerConfig, facts: SamplerFacts, group: RolloutBatch
) -> float:
    """Count the distinct canvases that an inner update runs for each completion of a group, on average.

    Completions share canvases with equal tokens, so this can be less than 1. A block-causal policy has all states of a
    completion in one canvas.
    """
    batch, updates = GroupedBatch.of(as_leaves(group, config.branches)), _inner_updates(config)
    corruptions = (config.estimator.corrupt(batch, update, facts) for update in updates)
    num_canvases = sum(len(make_terms(batch, shape, corruption).views.ids) for corruption in corruptions)
    return num_canvases / len(updates) / group.num_rows


def as_leaves(group: RolloutBatch, branches: Sequence[int]) -> RolloutBatch:
    """Make the completions of a full group the leaves of a rollout tree, equal where they share a level; `branches` is
    empty without one."""
    if not branches:
        return group
    nodes_BD = torch.tensor([[*inner_nodes(branches, leaf), leaf] for leaf in range(group.num_rows)])
    level_BL = group.step_map * len(branches) // (int(group.step_map.max()) + 1)
    return replace(group, completion_ids=2 + nodes_BD.gather(1, level_BL), node_keys=nodes_BD)


def _of_teacher(
    terms: Terms, batch: GroupedBatch, shape: TransformerConfig, objective: DistillationConfig, facts: SamplerFacts
) -> Views:
    """Return the canvases that a teacher runs on: completed texts, or with the policy as teacher its states."""
    if objective.needs_teacher:
        return completed_texts(terms, batch, shape.pad_token_id)
    return teacher_views(terms, batch, shape, objective, facts)[0]


def _inner_updates(config: LearnerConfig) -> list[InnerUpdate]:
    return [InnerUpdate(index, config.inner_updates) for index in range(config.inner_updates)]


def full_group(num_rows: int, prompt_tokens: int, gen_length: int, num_steps: int) -> RolloutBatch:
    """Build a group whose completions fill their canvases, denoised from left to right in even shares.

    Their tokens differ, because equal canvases would be counted once.
    """
    rows, prompt, length = num_rows, prompt_tokens, gen_length
    slots = torch.arange(length).expand(rows, -1)
    zeros_BL, zeros_B = torch.zeros(rows, length), torch.zeros(rows)
    return RolloutBatch(
        # Any tokens that are not special.
        prompt_ids=torch.full((rows, prompt), 2),
        prompt_lengths=torch.full((rows,), prompt),
        completion_ids=2 + torch.arange(rows)[:, None].expand(-1, length),
        completion_lengths=torch.full((rows,), length),
        sample_keys=torch.arange(rows),
        rewards=zeros_B,
        reward_parts=zeros_B[:, None],
        correct=zeros_B.bool(),
        truncated=zeros_B.bool(),
        is_stop=zeros_BL.bool(),
        group_ids=torch.zeros(rows, dtype=torch.int64),
        step_map=slots * num_steps // length,
        commit_logp=zeros_BL,
        commit_entropy=zeros_BL,
        commit_law_entropy=zeros_BL,
        fallback=zeros_BL.bool(),
        num_forwards=torch.full((rows,), num_steps),
        policy_versions=torch.zeros(rows, dtype=torch.int64),
        step_rewards=torch.zeros(rows, num_steps),
        step_answers=torch.full((), 2, dtype=torch.int32).expand(rows, num_steps, length),
    )
