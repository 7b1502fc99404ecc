"""DMPO: match the policy to the reward-tilted reference, p(o) ~ reference(o) e^(reward / alpha).

Within a group a completion's weight is its normalised importance ratio of the tilted reference to the old policy, minus
the same for the negated reward. The loss is the weighted denoising loss (DMPO, arXiv 2510.08233).

Shape letters: N terms, B rows, G groups.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from learner.estimators.base import Estimator, RowValue, SamplerFacts
from learner.estimators.groupings import Level
from learner.estimators.terms import Terms
from learner.objectives.base import Logps, Loss
from learner.objectives.compatibility import shared_incompatibility
from learner.objectives.units import Normalize, RowFacts, group_softmax


class DistributionMatchingConfig(BaseModel):
    """The difference of two softmaxes over a group, times the mean log-probability of a masked token."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    compares_groups: ClassVar[bool] = True
    tilts_by_reward: ClassVar[bool] = True
    needs_teacher: ClassVar[bool] = False
    weigh_by_length: ClassVar[bool] = False
    needs_old: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = True
    precomputes_row_weights: ClassVar[bool] = True
    needs_float32_head: ClassVar[bool] = False
    level: ClassVar[Level] = Level.ROW
    normalize_by: ClassVar[Normalize] = Normalize.GROUP_SUM

    name: Literal["distribution_matching"] = "distribution_matching"
    """The objective."""
    alpha: Annotated[float, Field(gt=0)] = 0.04
    """Temperature of the reward."""

    def incompatibility(self, estimator: Estimator, max_staleness: int) -> str | None:
        """Return why it does not fit: it compares ELBOs."""
        own = None
        if estimator.facts.row_value is not RowValue.ELBO:
            own = f"objective {self.name} compares ELBOs: estimator must give them, as elbo does, not {estimator.name}"
        return shared_incompatibility(self, estimator, max_staleness, own=own)

    def sampler_incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return None: it uses no record of the sampler."""
        return None

    def loss(self, terms: Terms, logps: Logps, rows: RowFacts) -> Loss:
        """Compute -(softmax(rho + r / alpha) - softmax(rho - r / alpha)) times the ELBO per slot.

        rho is the reference's ELBO minus the old policy's, computed before the first update, under separate masks.
        """
        assert rows.log_weights is not None, "the learner weighs rows where precomputes_row_weights says so"
        elbo_B, importance_B = rows.values(terms, logps.new), rows.shares(terms)
        counts_B = importance_B > 0
        # A softmax within a group is the same for rewards and mean-centred advantages, which differ by a constant.
        tilt_B, of_groups = rows.advantages / self.alpha, (rows.groups, counts_B, rows.num_groups)
        positive_B = group_softmax(rows.log_weights + tilt_B, *of_groups)
        negative_B = group_softmax(rows.log_weights - tilt_B, *of_groups)
        loss_B = -(positive_B - negative_B) * elbo_B / rows.sizes
        return Loss(total=(loss_B * importance_B).sum())
