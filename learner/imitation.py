"""Imitation of the round's correct completions with SFT's denoising loss.

A policy gradient covers the states that the sampler went through; random masks cover all states of a decode.
"""

from __future__ import annotations

import torch

from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import RandomMasksConfig, SamplerFacts
from learner.objectives import Normalize, WeightedLikelihoodConfig
from learner.parallel.sharding import ShardedPolicy
from learner.round import Round, Selection

_MASKS = RandomMasksConfig(min_ratio=0.0, max_ratio=1.0, ratios="spread", coupled=False)
DENOISING_LOSS = WeightedLikelihoodConfig(normalize_by=Normalize.ROUND)
"""The mean cross-entropy of a masked token, in nats."""


def demonstrations(policy: ShardedPolicy, config: LearnerConfig, sampler: SamplerFacts, batch: RolloutBatch) -> Round:
    """Return the correct completions of a round, with new masks at every update, each at its own ratio in [0, 1]."""
    masked = config.model_copy(update={"estimator": _MASKS, "objective": DENOISING_LOSS})
    return Round(
        policy, masked, sampler, batch, Selection(kept=batch.correct, advantages=torch.ones_like(batch.rewards))
    )
