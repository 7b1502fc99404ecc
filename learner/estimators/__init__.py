"""Likelihood estimators: which corrupted canvases to run, and which slots each one scores."""

from typing import Annotated

from pydantic import Field

from learner.estimators.base import Estimator, EstimatorFacts, InnerUpdate, SamplerFacts, ScoredSlots
from learner.estimators.block_masks import BlockMasksConfig
from learner.estimators.block_states import BlockStatesConfig
from learner.estimators.elbo import Counts, ElboConfig
from learner.estimators.one_step import OneStepConfig
from learner.estimators.random_masks import RandomMasksConfig
from learner.estimators.terms import Corruption, Terms, make_terms, unit_keys
from learner.estimators.trajectory import TrajectoryConfig
from learner.estimators.views import Views, share_equal_views, token_logps, token_streams

EstimatorConfig = Annotated[
    OneStepConfig | RandomMasksConfig | ElboConfig | BlockMasksConfig | TrajectoryConfig | BlockStatesConfig,
    Field(discriminator="name"),
]
"""Config of any estimator, discriminated by `name`."""

__all__ = [
    "BlockMasksConfig",
    "BlockStatesConfig",
    "Corruption",
    "Counts",
    "ElboConfig",
    "Estimator",
    "EstimatorConfig",
    "EstimatorFacts",
    "InnerUpdate",
    "OneStepConfig",
    "RandomMasksConfig",
    "SamplerFacts",
    "ScoredSlots",
    "Terms",
    "TrajectoryConfig",
    "Views",
    "make_terms",
    "share_equal_views",
    "token_logps",
    "token_streams",
    "unit_keys",
]
