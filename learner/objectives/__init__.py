"""Objectives: losses of the likelihoods of graded completions."""

from typing import Annotated

from pydantic import Field

from learner.objectives.base import Logps, Loss, Objective
from learner.objectives.clipped_ratio import ClippedRatioConfig, Kl
from learner.objectives.distillation import DistillationConfig
from learner.objectives.distribution_matching import DistributionMatchingConfig
from learner.objectives.linear_bound import LinearBoundConfig
from learner.objectives.preference import PreferenceConfig
from learner.objectives.sandwich import SandwichConfig
from learner.objectives.trajectory_balance import TrajectoryBalanceConfig
from learner.objectives.units import Normalize, RowFacts, normalized, units_of
from learner.objectives.weighted_likelihood import WeightedLikelihoodConfig

ObjectiveConfig = Annotated[
    ClippedRatioConfig
    | WeightedLikelihoodConfig
    | SandwichConfig
    | LinearBoundConfig
    | PreferenceConfig
    | DistributionMatchingConfig
    | DistillationConfig
    | TrajectoryBalanceConfig,
    Field(discriminator="name"),
]
"""Config of any objective, discriminated by `name`."""

__all__ = [
    "ClippedRatioConfig",
    "DistillationConfig",
    "DistributionMatchingConfig",
    "Kl",
    "LinearBoundConfig",
    "Logps",
    "Loss",
    "Normalize",
    "Objective",
    "ObjectiveConfig",
    "PreferenceConfig",
    "RowFacts",
    "SandwichConfig",
    "TrajectoryBalanceConfig",
    "WeightedLikelihoodConfig",
    "normalized",
    "units_of",
]
