"""BGPO's bound: linear in the Monte-Carlo draws, which accumulate at constant memory.

See arXiv 2510.11683.

Shape letters: N terms, U units.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from learner.estimators.base import Estimator, SamplerFacts
from learner.estimators.groupings import Level
from learner.estimators.terms import Terms
from learner.model.deferred import torch
from learner.objectives.base import Logps, Loss, clamp_log_ratios, is_clamped
from learner.objectives.compatibility import shared_incompatibility
from learner.objectives.units import Normalize, RowFacts, units_of


class LinearBoundConfig(BaseModel):
    """A lower bound of the ratio objective that is a sum over draws, equal to it in value and gradient on-policy."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    precomputes_row_weights: ClassVar[bool] = False
    needs_float32_head: ClassVar[bool] = False
    compares_groups: ClassVar[bool] = False
    tilts_by_reward: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False
    weigh_by_length: ClassVar[bool] = False
    needs_old: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = False
    level: ClassVar[Level] = Level.PART

    name: Literal["linear_bound"] = "linear_bound"
    """The objective."""
    per_slot: bool = True
    """Divide a draw's log-ratio by the number of slots that the estimate covers."""
    normalize_by: Normalize = Normalize.ROUND
    """What the loss is a mean over."""

    def incompatibility(self, estimator: Estimator, max_staleness: int) -> str | None:
        """Return why it does not fit: it sums over draws, each an estimate of the whole."""
        return shared_incompatibility(self, estimator, max_staleness, takes_draws=True)

    def sampler_incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return None: it uses no record of the sampler."""
        return None

    def loss(self, terms: Terms, logps: Logps, rows: RowFacts) -> Loss:
        """Compute -(1 + d) A if A >= 0, else -e^d A, of each draw's log-ratio d, weighted by its share.

        A unit's value is one draw's estimate of the whole, so weights must not be divided by the number of draws.
        """
        units = units_of(terms, Level.PART)
        advantages_U = rows.advantages[units.rows]
        size_U = rows.sizes[units.rows] if self.per_slot else 1.0
        log_ratio_U = units.sum(terms.weights * (logps.new - logps.old)) / size_U
        # 1 + d is a lower bound of the ratio; e^d is an upper bound, which a negative advantage makes a lower one.
        bound_U = torch.where(advantages_U < 0, clamp_log_ratios(log_ratio_U).exp(), 1 + log_ratio_U)
        loss_U = -bound_U * advantages_U
        return Loss(
            total=(loss_U * units.importance).sum(),
            per_unit={"ratio": clamp_log_ratios(log_ratio_U.detach()).exp(), "ratio_cut": is_clamped(log_ratio_U)},
        )
