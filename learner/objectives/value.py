"""Configuration of the value model: a recipe's section `learner.value`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from learner.estimators.base import Estimator, SamplerFacts
from learner.estimators.groupings import Level
from learner.estimators.trajectory import TrajectoryConfig
from learner.model.config import TransformerConfig
from learner.objectives.base import Objective

Discount = Annotated[float, Field(ge=0, le=1)]


def value_shape(policy: TransformerConfig) -> TransformerConfig:
    """Return the shape of a policy's value model, as FLOP and memory are counted: one output."""
    return policy.model_copy(update={"vocab_size": 1})


class ValueConfig(BaseModel):
    """A value model, whose predictions are the baseline of each denoise step (TraceRL, arXiv 2509.06949).

    It is a second network with the policy's backbone and a linear head, as in the authors' code, dLLM-RL.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    lr: PositiveFloat | None = None
    """Its learning rate; it warms up and decays as `learner.lr` does. null: five times `learner.lr`, as in dLLM-RL's
    configurations."""
    gamma: Discount = 1.0
    """Discount per denoise step, or segment of steps (dLLM-RL: 1, with process rewards 0.99)."""
    lam: Discount = 1.0
    """GAE's lambda (arXiv 1506.02438): 1 weighs whole returns, 0 the next step's value."""
    clip: PositiveFloat = 0.2
    """A prediction's loss is clipped where it is this far from that of the start of the round (PPO's value clip)."""

    def incompatibility(self, estimator: Estimator, objective: Objective) -> str | None:
        """Return why it cannot be combined with an estimator and objective; None if it can."""
        if objective.name != "clipped_ratio":
            return f"value needs objective clipped_ratio, whose advantages may differ by step, not {objective.name}"
        if objective.level is Level.ROW:
            return "value needs objective.level token or part; a ratio of whole completions has a single advantage"
        if not isinstance(estimator, TrajectoryConfig):
            return (
                f"value needs estimator trajectory, which keeps the record of denoise steps, not {estimator.name}: "
                "values are of the sampler's states"
            )
        if estimator.num_sampled is not None or estimator.only != "all" or estimator.num_shown_steps:
            return (
                "value needs all steps of a completion: set estimator.num_sampled null, estimator.only all and "
                "estimator.num_shown_steps 0"
            )
        return None

    def sampler_incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return why it cannot learn from completions of such a sampler; None if it can."""
        if sampler.edits:
            return "value has one prediction for each token, and under token editing a token is written several times"
        return None
