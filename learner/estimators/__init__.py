"""Likelihood estimators: which corrupted canvases to run, and which slots each one scores."""

from typing import Annotated

from pydantic import Field

from learner.estimators.base import Estimator, EstimatorFacts, InnerUpdate, RowValue, SamplerFacts, ScoredSlots
from learner.estimators.block_masks import BlockMasksConfig
from learner.estimators.block_states import BlockStatesConfig
from learner.estimators.elbo import ElboConfig, MaskCounts
from learner.estimators.one_step import OneStepConfig
from learner.estimators.random_masks import RandomMasksConfig
from learner.estimators.states.predictions import PredictionsConfig
from learner.estimators.states.sampled_states import SampledStatesConfig
from learner.estimators.states.step_states import StepStatesConfig, num_states, shown_future
from learner.estimators.terms import Corruption, Terms, make_terms, unit_keys
from learner.estimators.trajectory import TrajectoryConfig
from learner.estimators.views import Views, deduplicated_views, token_hidden_states, token_logps

EstimatorConfig = Annotated[
    OneStepConfig
    | RandomMasksConfig
    | ElboConfig
    | BlockMasksConfig
    | TrajectoryConfig
    | BlockStatesConfig
    | StepStatesConfig
    | SampledStatesConfig
    | PredictionsConfig,
    Field(discriminator="name"),
]
"""Config of any estimator, discriminated by `name`."""

__all__ = [
    "BlockMasksConfig",
    "BlockStatesConfig",
    "Corruption",
    "ElboConfig",
    "Estimator",
    "EstimatorConfig",
    "EstimatorFacts",
    "InnerUpdate",
    "MaskCounts",
    "OneStepConfig",
    "PredictionsConfig",
    "RandomMasksConfig",
    "RowValue",
    "SampledStatesConfig",
    "SamplerFacts",
    "ScoredSlots",
    "StepStatesConfig",
    "Terms",
    "TrajectoryConfig",
    "Views",
    "deduplicated_views",
    "make_terms",
    "num_states",
    "shown_future",
    "token_hidden_states",
    "token_logps",
    "unit_keys",
]
