"""Likelihood estimators: which corrupted canvases to run, and which slots each one scores."""

from learner.estimators.one_step import OneStep, OneStepConfig
from learner.estimators.views import Views, share_equal_views, token_logps

__all__ = ["OneStep", "OneStepConfig", "Views", "share_equal_views", "token_logps"]
