"""Trajectory balance (TBA): match the policy to the reward-tilted reference.

At the optimum, reference(o) e^(reward / beta) / Z, the residual log Z + new - reference - reward / beta is 0 for every
completion, whichever policy sampled it. The loss is its square. log Z is the group's least-squares fit, the mean of
reward / beta - new + reference (VarGrad), so that the loss is the variance of the log Z estimates within a group
(arXiv 2503.18929).

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
from learner.objectives.units import Normalize, RowFacts


class TrajectoryBalanceConfig(BaseModel):
    """The square of log Z + new - reference - reward / beta, with log Z estimated from the group."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    precomputes_row_weights: ClassVar[bool] = False
    needs_float32_head: ClassVar[bool] = False
    compares_groups: ClassVar[bool] = True
    tilts_by_reward: ClassVar[bool] = True
    needs_teacher: ClassVar[bool] = False
    weigh_by_length: ClassVar[bool] = False
    needs_old: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = True
    level: ClassVar[Level] = Level.ROW
    normalize_by: ClassVar[Normalize] = Normalize.ROW_SUM

    name: Literal["trajectory_balance"] = "trajectory_balance"
    """The objective."""
    beta: Annotated[float, Field(gt=0)] = 0.014
    """Temperature of the reward; a smaller one moves the optimum further from the reference."""

    def incompatibility(self, estimator: Estimator, max_staleness: int) -> str | None:
        """Return why it does not fit: it needs the log-likelihood of a completion, at any policy lag."""
        own = None
        if estimator.facts.row_value not in (RowValue.ELBO, RowValue.LOG_LIKELIHOOD):
            own = (
                "objective trajectory_balance is of a completion's log-likelihood: estimator must give it, as elbo "
                "does, or trajectory with only: all and, if segments are drawn, weigh: value; not "
                f"{estimator.name} as it is set"
            )
        return shared_incompatibility(self, estimator, max_staleness, own=own, takes_stale=True)

    def sampler_incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return None: it uses no record of the sampler."""
        return None

    def loss(self, terms: Terms, logps: Logps, rows: RowFacts) -> Loss:
        """Compute the mean over completions of the squared residual."""
        assert logps.reference is not None, "the learner has a reference where needs_reference says so"
        gain_B, share_B = rows.values(terms, logps.new - logps.reference), rows.shares(terms)
        # A mean-centred advantage is the reward up to a constant of the group, which log Z absorbs.
        residual_B = gain_B - rows.advantages / self.beta
        counts_B = (share_B > 0).to(residual_B.dtype)
        sums_G = residual_B.new_zeros(rows.num_groups).index_add(0, rows.groups, residual_B * counts_B)
        sizes_G = residual_B.new_zeros(rows.num_groups).index_add(0, rows.groups, counts_B)
        residual_B = residual_B - (sums_G / sizes_G.clamp(min=1))[rows.groups]
        return Loss(total=(residual_B.square() * share_B).sum())
