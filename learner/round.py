"""A round's data on one rank: its rows, or a minibatch of them, and their canvases in micro-batches.

Shape letters: B rows of this rank, N terms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.advantages import Rewards, group_advantages, prediction_advantages, step_advantages
from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import (
    InnerUpdate,
    PredictionsConfig,
    SamplerFacts,
    Terms,
    TrajectoryConfig,
    make_terms,
    token_logps,
    unit_keys,
)
from learner.flops import NO_CANVASES, CanvasSums
from learner.objectives import Logps, RowFacts, normalized
from learner.parallel.dealing import RowCosts, deal, view_tokens
from learner.parallel.micro_batches import MicroBatches, make_micro_batches
from learner.parallel.sharding import ShardedPolicy
from learner.tree.nodes import node_advantages, sibling_targets

WEIGHING = -1
"""Index of the plan that row weights are computed from, before the first update; masks that vary by update are its own.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The completions that are trained on, and their advantages."""

    kept: Tensor
    """[B] bool."""
    advantages: Tensor
    """[B] float32."""

    def of(self, rows_B: Tensor) -> Selection:
        """Return those of some rows, by index or mask."""
        return Selection(kept=self.kept[rows_B], advantages=self.advantages[rows_B])


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The canvases and terms that one optimizer step runs on this rank."""

    key: int
    """The estimator's mask key: plans with equal keys are equal."""
    terms: Terms
    """All terms, on the rank's device. Their importance is their unit's share of the step's loss."""
    micro_batches: tuple[Terms, ...]
    """The terms in micro-batches, followed by weightless ones so that all ranks have equally many."""
    counts: tuple[bool, ...]
    """Whether any term of each micro-batch has a weight in the loss."""
    is_split: bool
    """Whether a unit spans several micro-batches, on any rank."""
    canvases: CanvasSums
    """Sizes of the canvases of a forward; zero if no term has a weight."""

    @property
    def ends(self) -> list[bool]:
        """Whether each micro-batch is the last one."""
        return [index == len(self.micro_batches) for index in range(1, len(self.micro_batches) + 1)]

    @property
    def term_slices(self) -> list[slice]:
        """The range of each micro-batch's terms among all terms; empty for the added weightless ones."""
        slices, begin = [], 0
        for micro in self.micro_batches:
            end = min(begin + micro.num_terms, self.terms.num_terms)
            slices.append(slice(begin, end))
            begin = end
        return slices


class Round:
    """The completions of a round, or of one of its minibatches, that this rank trains on."""

    def __init__(
        self,
        policy: ShardedPolicy,
        config: LearnerConfig,
        sampler: SamplerFacts,
        batch: RolloutBatch,
        selection: Selection | None = None,
        *,
        index: int = 0,
    ) -> None:
        """Take this rank's share of `batch`, which is the whole round on every rank.

        `selection` selects completions and gives their advantages; None: the config's filters and advantage do. `index`
        is the round's.
        """
        self._policy, self._config, self._sampler, self._index = policy, config, sampler, index
        selection = selection or _select(batch, config)
        self.num_rows = int(selection.kept.sum())
        if self.num_rows:
            grouped = GroupedBatch.of(batch.select(selection.kept))
            # Of whole groups, as the completions' advantages are.
            advantages_BT = _step_advantages(batch, config, sampler)
            if advantages_BT is not None:
                grouped = replace(grouped, step_advantages=advantages_BT[selection.kept])
            self._take(self._with_sibling_targets(grouped), selection.of(selection.kept))

    def minibatches(self) -> list[Round]:
        """Split the round into the minibatches of a sweep's optimizer steps, equally many on every rank.

        Rows keep the advantages and random masks that they have in the whole round.
        """
        count, whole_groups = self._config.num_minibatches, self._config.objective.compares_groups
        return [self._some(rows_B) for rows_B in self._all.minibatches(count, whole_groups=whole_groups)]

    def _some(self, rows_B: Tensor) -> Round:
        some = copy.copy(self)
        some._take(self._all.select(rows_B), self._selection.of(rows_B))
        return some

    def _take(self, grouped: GroupedBatch, selection: Selection) -> None:
        """Take this rank's share of some rows."""
        policy, config = self._policy, self._config
        self._all, self._selection, self.num_rows = grouped, selection, grouped.num_rows
        self._plan: StepPlan | None = None
        # A minibatch counts its own groups.
        groups_G, group_B = grouped.group_index.unique(return_inverse=True)
        mine = self._dealt(grouped, group_B)
        shard = grouped.select(mine) if len(mine) else grouped.empty_row()
        own = selection.of(mine if len(mine) else torch.zeros(1, dtype=torch.int64))
        # Planning is on the CPU: reading a count from a device would make the host wait for all work that is queued.
        self.on_host = shard
        self._facts = RowFacts(
            advantages=own.advantages if len(mine) else torch.zeros(1),
            step_advantages=shard.step_advantages,
            sibling_targets=self._weighted(shard.sibling_targets),
            groups=group_B[mine] if len(mine) else group_B[:1],
            sizes=config.estimator.sizes(shard).float().clamp(min=1),
            correct=shard.correct,
            num_rows=self.num_rows,
            num_correct=int(grouped.correct.sum()),
            num_groups=len(groups_G),
        )
        # Step answers are large, and only planning reads them.
        self.batch = replace(shard, step_answers=None).to(policy.device)
        self.rows = self._facts.on(policy.device)

    def _with_sibling_targets(self, grouped: GroupedBatch) -> GroupedBatch:
        """Add the targets of a rollout tree's siblings, if the round has a consistency loss."""
        consistency, estimator, progress = self._config.consistency, self._config.estimator, self._progress
        if consistency is None or consistency.coef_at(progress) == 0:
            return grouped
        assert isinstance(estimator, TrajectoryConfig), "the config checks that its completions are a tree"
        level_BL = estimator.scored_segments(grouped, self._sampler)
        targets_BL2 = sibling_targets(grouped, level_BL, consistency.temperature_at(progress))
        return replace(grouped, sibling_targets=targets_BL2)

    def _weighted(self, targets_BL2: Tensor | None) -> Tensor | None:
        """Scale the weights of this rank's targets so that those of all ranks add up to the loss's."""
        whole_BL2, consistency = self._all.sibling_targets, self._config.consistency
        if targets_BL2 is None or whole_BL2 is None or consistency is None:
            return None
        coef = consistency.coef_at(self._progress)
        # Without a better sibling there is no weight to scale.
        total = float(whole_BL2[:, :, 0].sum())
        return targets_BL2 * torch.tensor([coef / total if total else 0.0, 1.0])

    @property
    def _progress(self) -> float:
        return self._config.progress_at(self._index)

    def _dealt(self, grouped: GroupedBatch, group_B: Tensor) -> Tensor:
        """Return this rank's rows of `grouped`, dealt by the tokens of the first update's canvases. A collective."""
        policy, config = self._policy, self._config
        if policy.world_size == 1:
            return torch.arange(grouped.num_rows)
        # Each rank counts some of the groups. The draws are not the round's, so that redrawn masks are dealt alike.
        counted = (group_B % policy.world_size == policy.rank).nonzero()[:, 0]
        tokens_2B = torch.zeros(2, grouped.num_rows, dtype=torch.float64)
        if len(counted):
            places_B = torch.arange(grouped.num_rows)
            some = replace(
                grouped, sample_keys=places_B, group_keys=group_B, round_keys=torch.zeros_like(group_B)
            ).select(counted)
            corruption = config.estimator.corrupt(some, InnerUpdate(0, config.inner_updates), self._sampler)
            terms = make_terms(some, policy.config, corruption, self._sampler.block_length)
            tokens_2B[:, counted] = torch.stack(view_tokens(terms, group_B[counted])).double()
        # Whole numbers, each from one rank: the sums are exact, and equal on all ranks.
        own, shared = policy.sum_over_ranks(tokens_2B).long().tolist()
        costs = RowCosts(own=own, groups=group_B.tolist(), shared=shared)
        shares = deal(costs, policy.world_size, whole_groups=config.objective.compares_groups)
        return torch.tensor(shares[policy.rank], dtype=torch.int64)

    def weigh_rows(self, log_ratios_N: Tensor) -> None:
        """Store the rows' log-weights for the objective: sums of the log-ratios [N] of the weighing plan's terms."""
        terms = self.plan(WEIGHING).terms
        sums_B = self.rows.values(terms, log_ratios_N)
        self.rows = replace(self.rows, log_weights=sums_B)

    def plan(self, index: int) -> StepPlan:
        """Return the plan of the `index`-th inner update. A collective."""
        update = InnerUpdate(index, self._config.inner_updates)
        key = self._config.estimator.mask_key(update)
        if self._plan is None or self._plan.key != key:
            self._plan = self._make_plan(key, update)
        return self._plan

    def _make_plan(self, key: int, update: InnerUpdate) -> StepPlan:
        objective, device = self._config.objective, self._policy.device
        corruption = self._config.estimator.corrupt(self.on_host, update, self._sampler)
        terms = make_terms(self.on_host, self._policy.config, corruption, self._sampler.block_length)
        if objective.needs_float32_head:
            terms = replace(terms, distribution=replace(terms.distribution, float32_head=True))
        if objective.weigh_by_length:
            terms = replace(terms, importance=terms.importance * self._facts.sizes[terms.rows])
        terms = normalized(terms, objective.level, objective.normalize_by, self._facts, self._policy.sum_over_ranks)
        packed = self._make_micro_batches(terms)
        others = self._policy.max_over_ranks(torch.tensor([len(packed.terms), packed.is_split]))
        num_micro_batches, is_split = others.tolist()
        idle = (terms.weightless().on(device),) * (num_micro_batches - len(packed.terms))
        counts = torch.stack([(micro.importance > 0).any() for micro in packed.terms]).tolist()
        return StepPlan(
            key=key,
            terms=terms.on(device),
            micro_batches=(*(micro.on(device) for micro in packed.terms), *idle),
            counts=(*counts, *(False for _ in idle)),
            is_split=bool(is_split),
            canvases=CanvasSums.of(terms.views) if any(counts) else NO_CANVASES,
        )

    def _make_micro_batches(self, terms: Terms) -> MicroBatches:
        objective = self._config.objective
        unit_N = self._facts.groups[terms.rows] if objective.compares_groups else unit_keys(terms, objective.level)
        return make_micro_batches(
            terms, unit_N, self._config.micro_batch_tokens, concatenates_rows=self._policy.concatenates_rows
        )

    def logps(self, terms: Terms, new_N: Tensor, old_N: Tensor, reference_N: Tensor | None) -> Logps:
        """Combine likelihoods of terms with those that the sampler recorded."""
        recorded_N = terms.recorded
        sampled_N = self.batch.commit_logp[terms.rows, terms.slots] if recorded_N is None else recorded_N
        return Logps(new=new_N, old=old_N, reference=reference_N, sampled=sampled_N)


def _select(batch: RolloutBatch, config: LearnerConfig) -> Selection:
    # A value model takes the rewards of blocks by step.
    rewards = Rewards.of(batch, outcome_only=config.value is not None)
    return Selection(
        kept=config.filters.keeps(rewards, batch.truncated, batch.speeds()),
        advantages=group_advantages(rewards, config.advantage),
    )


def _step_advantages(batch: RolloutBatch, config: LearnerConfig, sampler: SamplerFacts) -> Tensor | None:
    """Return the advantage of each denoise step, or node of a rollout tree, [B, T]; None if it is the completion's."""
    estimator, rewards = config.estimator, Rewards.of(batch)
    if config.branches:
        assert batch.node_keys is not None, "samplers draw a tree for such a config"
        return node_advantages(rewards, batch.node_keys, config.advantage)
    if not (config.step_gain_coef or config.samples_step_answers):
        return None
    assert batch.step_rewards is not None, "samplers record step answers for such a config, and graders grade them"
    if isinstance(estimator, PredictionsConfig):
        return prediction_advantages(rewards, batch.step_rewards, sampler.max_denoise_steps)
    assert isinstance(estimator, TrajectoryConfig), "the config checks what step_gain_coef needs"
    rank_BT = estimator.step_ranks(GroupedBatch.of(batch), sampler)
    return step_advantages(rewards, batch.step_rewards[:, : rank_BT.shape[1]], rank_BT, config.step_gain_coef)


def scored_logps(policy: ShardedPolicy, plan: StepPlan, logps: Callable[[Terms], Tensor] | None = None) -> Tensor:
    """Compute the log-probabilities [N] of all terms of a plan, or their `logps`, without gradients. A collective."""

    def of_policy(micro: Terms) -> Tensor:
        return token_logps(policy.module, micro.views, micro.distribution, policy.device)

    with policy.without_gradients():
        return concatenate_values([(logps or of_policy)(micro) for micro in plan.micro_batches], plan)


def concatenate_values(parts: list[Tensor], plan: StepPlan) -> Tensor:
    """Concatenate the values of all terms, [N], without those of the added weightless micro-batches."""
    return torch.cat(parts)[: plan.terms.num_terms]
