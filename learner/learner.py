"""The learner: improves a policy by policy gradients.

An ordinary class, whole on one process or one rank of many. Every rank is given the same batch, works on its shard
of the rows and leaves with the same metrics. Micro-batches stream; the gradient is that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from learner.advantages import Advantage, group_advantages, zero_variance_share
from learner.batch import RolloutBatch, shard_rows
from learner.estimators import OneStep, OneStepConfig, Views, token_logps
from learner.objectives import ClippedRatioConfig, clipped_ratio
from learner.optimizer import PolicyOptimizer
from learner.sharding import ShardedPolicy

Metrics = dict[str, float]


class LearnerConfig(BaseModel):
    """Stage 2: policy gradients. The defaults are d1's (arXiv 2504.12216 and its published configuration)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    num_workers: PositiveInt = 2
    """Ranks of the learner; the policy is sharded over them."""
    num_rounds: NonNegativeInt
    """Rounds to train; each publishes one policy version."""
    groups_per_round: PositiveInt = 16
    """Problems of a round (P)."""
    group_size: Annotated[int, Field(ge=2)] = 6
    """Completions of each problem (G). At least 2: the advantage compares them."""
    inner_updates: PositiveInt = 12
    """Optimizer steps on each round's completions (mu)."""
    micro_batch_size: PositiveInt = 64
    """Rows of one forward and backward on one worker."""
    lr: PositiveFloat = 3e-6
    """Learning rate after warm-up."""
    final_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The rate falls linearly towards this share of `lr` at the end of the rounds; 1 is constant (d1)."""
    num_warmup_rounds: NonNegativeInt = 0
    """Rounds of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """AdamW's."""
    max_grad_norm: PositiveFloat = 0.2
    """Gradients are clipped to this global norm."""
    max_staleness: NonNegativeInt = 0
    """A round trains on completions at most this many policy versions old; 0 is exactly synchronous."""
    advantage: Advantage = Advantage.GROUP_MEAN
    """How rewards become advantages."""
    estimator: OneStepConfig = OneStepConfig()
    """Which corrupted canvases give the likelihood."""
    objective: ClippedRatioConfig = ClippedRatioConfig()
    """What is minimised."""
    reference_sync_rounds: NonNegativeInt = 0
    """Rounds after which the KL reference becomes the current policy; 0 keeps the policy that RL started from.
    (d1 asks for a sync every 64 steps, which does nothing under LoRA.)"""

    def lr_at(self, round_index: int) -> float:
        """The learning rate of a round."""
        warmup = min(1.0, (round_index + 1) / (self.num_warmup_rounds + 1))
        return self.lr * warmup * (1.0 - (1.0 - self.final_lr_fraction) * round_index / max(1, self.num_rounds))


class Learner:
    """Stage 2 on one rank. Knows estimators, objectives and advantages by their interfaces only."""

    def __init__(self, policy: ShardedPolicy, config: LearnerConfig) -> None:
        self.policy = policy
        self.config = config
        self.optimizer = PolicyOptimizer(policy, betas=config.betas, weight_decay=config.weight_decay)
        self.reference: ShardedPolicy | None = None
        if config.objective.kl_coef > 0:
            self.reference = policy.frozen_copy(policy.full_weights())
        self._estimator = OneStep(config.estimator, policy.config)

    def update(self, batch: RolloutBatch, round_index: int) -> Metrics:
        """Train on one round: `inner_updates` optimizer steps, each on all of its completions.

        Old likelihoods are those of the policy at the start of the round, under the same masks as the new ones.
        Raises FloatingPointError when the gradient is not finite.
        """
        advantages_B = group_advantages(batch.rewards, batch.group_ids, self.config.advantage)
        shard = batch.shard(self.policy.rank, self.policy.world_size).to(self.policy.device)
        rows, _ = shard_rows(batch.num_rows, self.policy.rank, self.policy.world_size)
        advantages_B = advantages_B[rows].to(self.policy.device)
        micro_batches = list(self._micro_batches(shard, advantages_B))
        old = [[self._old_logps(micro, update) for micro, _ in micro_batches] for update in self._old_updates()]
        num_tokens = int(batch.completion_lengths.sum())
        totals = torch.zeros(4)
        is_by_round = self.config.objective.normalize_by == "round"
        num_shares = len(micro_batches) * self.policy.world_size
        grad_norms = []
        for update in range(self.config.inner_updates):
            for index, (micro, advantages) in enumerate(micro_batches):
                old_N = old[update - 1][index] if update else None
                views = self._estimator.plan(micro, update)
                advantages_N = advantages[:, None].expand(-1, micro.num_slots)[micro.completion_mask()]
                # Each token's share of the mean: of the round's, or as d1 has it of its micro-batch's.
                share = 1 / num_tokens if is_by_round else 1 / (max(1, len(advantages_N)) * num_shares)
                totals += self._backward(views, advantages_N, old_N, share)
            grad_norms.append(self.optimizer.step(self.config.lr_at(round_index), self.config.max_grad_norm))
        self._sync_reference(round_index)
        totals = self.policy.sum_over_ranks(totals) / (num_tokens * self.config.inner_updates)
        loss, clipped, kl, logp = totals.tolist()
        return {
            "loss": loss,
            "clip_fraction": clipped,
            "kl": kl,
            "token_logp": logp,
            "grad_norm": sum(grad_norms) / len(grad_norms),
            "lr": self.config.lr_at(round_index),
            "zero_variance_share": zero_variance_share(batch.rewards, batch.group_ids),
        }

    def full_state(self) -> dict[str, Tensor]:
        """What a resumed run needs besides the weights: the optimizer, and a reference that has moved.

        A collective; whole on rank 0, empty on the others.
        """
        state = {f"optimizer/{name}": tensor for name, tensor in self.optimizer.full_state().items()}
        if self.reference is not None and self.config.reference_sync_rounds:
            state |= {f"reference/{name}": tensor for name, tensor in self.reference.weights_on_rank_0().items()}
        return state

    def load_full_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `full_state` gave."""
        parts: dict[str, dict[str, Tensor]] = {"optimizer": {}, "reference": {}}
        for name, tensor in state.items():
            part, _, rest = name.partition("/")
            parts[part][rest] = tensor
        self.optimizer.load_full_state(parts["optimizer"])
        if self.reference is not None and parts["reference"]:
            self.reference.load_full_weights(parts["reference"])

    def _old_updates(self) -> range:
        # At the first inner update the policy is still the old one: new.detach() is its likelihood, for free.
        return range(1, self.config.inner_updates)

    def _micro_batches(self, shard: RolloutBatch, advantages_B: Tensor) -> Iterator[tuple[RolloutBatch, Tensor]]:
        for start in range(0, shard.num_rows, self.config.micro_batch_size):
            rows = slice(start, start + self.config.micro_batch_size)
            yield shard.select(rows), advantages_B[rows]

    @torch.no_grad()
    def _old_logps(self, micro: RolloutBatch, update: int) -> Tensor:
        return token_logps(self.policy.module, self._estimator.plan(micro, update))

    def _backward(self, views: Views, advantages_N: Tensor, old_N: Tensor | None, share: float) -> Tensor:
        """Add one micro-batch's gradient. Returns the sums [loss, clipped, kl, logp] over its tokens."""
        new_N = token_logps(self.policy.module, views)
        old_N = new_N.detach() if old_N is None else old_N
        terms = clipped_ratio(self.config.objective, new_N, old_N, self._reference_logps(views), advantages_N)
        # FSDP averages over ranks; the objective is a sum over them.
        (terms.loss.sum() * share * self.policy.world_size).backward()
        sums = [terms.loss.detach().sum(), terms.is_clipped.sum(), terms.kl.sum(), new_N.detach().sum()]
        return torch.stack([value.float() for value in sums]).cpu()

    @torch.no_grad()
    def _reference_logps(self, views: Views) -> Tensor | None:
        return None if self.reference is None else token_logps(self.reference.module, views)

    def _sync_reference(self, round_index: int) -> None:
        every = self.config.reference_sync_rounds
        if self.reference is not None and every and (round_index + 1) % every == 0:
            self.reference.load_full_weights(self.policy.full_weights())
