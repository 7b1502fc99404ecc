"""Masked SFT on one rank: the loss of `learner/sft.py`, an optimizer step at a time."""

from __future__ import annotations

from dataclasses import replace

import torch

from learner.batch import CompletionBatch
from learner.estimators import token_logps
from learner.optimizer import PolicyOptimizer
from learner.sft import SftConfig, plan_sft, sft_rows
from learner.sharding import ShardedPolicy

Metrics = dict[str, float]


class SftLearner:
    """Stage 1 on one rank."""

    def __init__(self, policy: ShardedPolicy, config: SftConfig, labels: CompletionBatch, seed: int) -> None:
        self.policy = policy
        self.config = config
        self._labels = labels
        self._seed = seed
        self.optimizer = PolicyOptimizer(policy, betas=(0.9, 0.99), weight_decay=config.weight_decay)

    def step(self, step: int, lr: float) -> Metrics:
        """One optimizer step on the rows that `step` draws."""
        batch_size = self.config.batch_size
        rows = sft_rows(self._labels.num_rows, batch_size, step, self._seed)
        # Keyed by place in the run, not by label: a label met twice is masked in two ways.
        keys = torch.arange(step * batch_size, (step + 1) * batch_size)
        batch = replace(self._labels.select(rows), sample_keys=keys)
        shard = batch.shard(self.policy.rank, self.policy.world_size).to(self.policy.device)
        views, weights_N = plan_sft(shard, self.policy.config, step, self._seed)
        loss = -(token_logps(self.policy.module, views) * weights_N).sum() / (batch_size * batch.num_slots)
        # FSDP averages over ranks; the loss is a sum over them.
        (loss * self.policy.world_size).backward()
        grad_norm = self.optimizer.step(lr, self.config.max_grad_norm)
        return {"loss": self.policy.sum_over_ranks(loss.detach()).item(), "grad_norm": grad_norm, "lr": lr}
