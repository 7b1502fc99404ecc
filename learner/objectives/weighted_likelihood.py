"""Advantage-weighted log-likelihood, without an importance ratio or reference (wd1, 2507.08838)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from learner.estimators.base import Estimator, SamplerFacts
from learner.estimators.groupings import Level
from learner.estimators.terms import Terms
from learner.objectives.base import Logps, Loss
from learner.objectives.compatibility import shared_incompatibility
from learner.objectives.units import Normalize, RowFacts, units_of


class WeightedLikelihoodConfig(BaseModel):
    """-A times the log-likelihood."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    precomputes_row_weights: ClassVar[bool] = False
    needs_float32_head: ClassVar[bool] = False
    compares_groups: ClassVar[bool] = False
    tilts_by_reward: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False
    weigh_by_length: ClassVar[bool] = False
    needs_old: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False

    name: Literal["weighted_likelihood"] = "weighted_likelihood"
    """The objective."""
    level: Level = Level.TOKEN
    """The units of the loss."""
    normalize_by: Normalize = Normalize.GROUP_SUM
    """What the loss is a mean over."""

    def incompatibility(self, estimator: Estimator, max_staleness: int) -> str | None:
        """Return the reason if the general checks fail; it works on any scored slots."""
        return shared_incompatibility(self, estimator, max_staleness)

    def sampler_incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return None: it uses no record of the sampler."""
        return None

    def loss(self, terms: Terms, logps: Logps, rows: RowFacts) -> Loss:
        """Compute -A times the value of each unit, weighted by its share."""
        units = units_of(terms, self.level)
        loss_U = -rows.advantages[units.rows] * units.sum(terms.weights * logps.new)
        return Loss(total=(loss_U * units.importance).sum())
