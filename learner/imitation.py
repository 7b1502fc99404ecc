"""The round's correct completions as demonstrations: SFT's denoising loss on what the policy found by itself.

A policy gradient reaches the states that the sampler went through; random masks reach all that one may decode through.
"""

from __future__ import annotations

import torch

from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import RandomMasksConfig, SamplerFacts
from learner.objectives import Normalize, WeightedLikelihoodConfig
from learner.parallel.sharding import ShardedPolicy
from learner.round import Round

_MASKS = RandomMasksConfig(min_ratio=0.0, max_ratio=1.0, ratios="spread", coupled=False)
DENOISING_LOSS = WeightedLikelihoodConfig(normalize_by=Normalize.ROUND)
"""The mean cross-entropy of a masked token, in nats."""


def demonstrations(policy: ShardedPolicy, config: LearnerConfig, sampler: SamplerFacts, batch: RolloutBatch) -> Round:
    """The correct completions of a round, masked anew at every update, each at a ratio of its own between 0 and 1."""
    masked = config.model_copy(update={"estimator": _MASKS, "objective": DENOISING_LOSS})
    return Round(policy, masked, sampler, batch, (batch.correct, torch.ones_like(batch.rewards)))
