"""The round's correct completions as demonstrations: SFT's denoising loss on what the policy found by itself.

A policy gradient reaches the states that the sampler went through; random masks reach all that one may decode through.

Shape letters: B rows of the batch, N masked tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import RandomMasksConfig, SamplerFacts, Terms
from learner.objectives import Normalize, WeightedLikelihoodConfig
from learner.round import Round
from learner.sharding import ShardedPolicy

_MASKS = RandomMasksConfig(min_ratio=0.0, max_ratio=1.0, ratios="spread", coupled=False)
_LOSS = WeightedLikelihoodConfig(normalize_by=Normalize.ROUND)


def demonstrations(policy: ShardedPolicy, config: LearnerConfig, sampler: SamplerFacts, batch: RolloutBatch) -> Round:
    """The correct completions of a round, masked anew at every update, each at a ratio of its own between 0 and 1."""
    masked = config.model_copy(update={"estimator": _MASKS, "objective": _LOSS})
    return Round(policy, masked, sampler, batch, (batch.correct, torch.ones_like(batch.rewards)))


def denoising_loss(terms: Terms, logps_N: Tensor) -> Tensor:
    """[] these terms' share of the mean cross-entropy of a masked token, in nats."""
    return -(terms.importance * logps_N).sum()
