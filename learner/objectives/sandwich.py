"""SPG's sandwich: a lower likelihood bound for good completions, an upper bound for bad ones.

Minimising a lower bound need not lower the likelihood; minimising an upper bound does (arXiv 2510.09541). With
`self_normalized` each completion is also weighted by its self-normalised importance ratio (StableDRL).

Shape letters: N terms, U tokens, B rows, D draws of all rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from learner.estimators.base import Estimator, RowValue, SamplerFacts
from learner.estimators.groupings import Level
from learner.estimators.terms import Terms
from learner.model.deferred import torch
from learner.objectives.base import Logps, Loss
from learner.objectives.compatibility import shared_incompatibility
from learner.objectives.units import Normalize, RowFacts, group_softmax, units_of

if TYPE_CHECKING:
    from torch import Tensor

_MAX_LOG_WEIGHT = math.log(5.0)


class SandwichConfig(BaseModel):
    """-A times a bound of the mean log-probability of a token: a lower bound if A > 0, else mixed with an upper one."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    precomputes_row_weights: ClassVar[bool] = False
    tilts_by_reward: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False
    needs_float32_head: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    level: ClassVar[Level] = Level.ROW

    name: Literal["sandwich"] = "sandwich"
    """The objective."""
    beta: Annotated[float, Field(ge=1)] = 1.5
    """Exponent of the evidence upper bound (EUBO): tightest at 1, with less variance above."""
    mix: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Weight of the upper bound for A <= 0; the lower bound has the rest. 1 is SPG-EUBO, 0.5 SPG-Mix, 0 the lower bound
    for all."""
    weigh_by_length: bool = True
    """Weight completions by their number of tokens (SPG), not equally (StableDRL)."""
    self_normalized: bool = False
    """Weight a group's completions by the softmax of new - old bounds, clamped above at log 5 (StableDRL)."""
    normalize_by: Normalize = Normalize.ROUND
    """What the loss is a mean over."""

    @property
    def needs_old(self) -> bool:
        """Whether rows are self-normalised, by a ratio to old likelihoods."""
        return self.self_normalized

    @property
    def compares_groups(self) -> bool:
        """Whether rows are self-normalised, which is within a group."""
        return self.self_normalized

    def incompatibility(self, estimator: Estimator, max_staleness: int) -> str | None:
        """Return why it does not fit: its bounds are of means over random masks, and the upper one of several draws."""
        return shared_incompatibility(self, estimator, max_staleness, own=self._own_incompatibility(estimator))

    def sampler_incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return None: it uses no record of the sampler."""
        return None

    def loss(self, terms: Terms, logps: Logps, rows: RowFacts) -> Loss:
        """Compute -A times the bound of each completion, weighted by its share."""
        lower_B = rows.values(terms, logps.new)
        bound_B, per_unit = lower_B, {}
        if self.mix > 0:
            mixed_B = torch.lerp(lower_B, self._upper(terms, logps.new, rows), self.mix)
            bound_B = torch.where(rows.advantages > 0, lower_B, mixed_B)
        importance_B = rows.shares(terms)
        if self.self_normalized:
            old_B = rows.values(terms, logps.old)
            weight_B = group_softmax(
                (lower_B.detach() - old_B).clamp(max=_MAX_LOG_WEIGHT), rows.groups, importance_B > 0, rows.num_groups
            )
            importance_B = importance_B * weight_B
            per_unit = {"ratio": (lower_B.detach() - old_B).exp()[units_of(terms, Level.ROW).rows]}
        return Loss(total=-(rows.advantages * bound_B * importance_B).sum(), per_unit=per_unit)

    def _own_incompatibility(self, estimator: Estimator) -> str | None:
        if estimator.facts.row_value is not RowValue.MASKED_MEAN:
            return f"objective sandwich needs random masks as those of estimator block_masks, not of {estimator.name}"
        if self.mix > 0 and not estimator.facts.splits_rows:
            return (
                f"objective.mix is {self.mix:g}, and of one draw both bounds have the same gradient: "
                "estimator.num_draws must be 2 or more, or mix 0"
            )
        return None

    def _upper(self, terms: Terms, new_N: Tensor, rows: RowFacts) -> Tensor:
        """Compute the upper bound, [B]: 1 / beta times the token mean of log E[p^beta 1(masked) / t], E over draws."""
        num_draws = terms.laid_out.num_parts
        of_draw_N = terms.rows * num_draws + terms.parts
        masked_D = torch.zeros(len(rows.sizes) * num_draws, device=new_N.device)
        masked_D = masked_D.index_add_(0, of_draw_N, torch.ones_like(new_N))
        log_ratio_N = masked_D[of_draw_N].log() - rows.sizes[terms.rows].log()
        units = units_of(terms, Level.TOKEN)
        value_N = self.beta * new_N - log_ratio_N - math.log(num_draws)
        log_mean_U = _logsumexp(value_N, units.of_term, len(units.rows))
        count_B = torch.zeros_like(rows.sizes).index_add_(0, units.rows, torch.ones_like(log_mean_U))
        sum_B = torch.zeros_like(rows.sizes).index_add(0, units.rows, log_mean_U)
        return sum_B / count_B.clamp(min=1) / self.beta


def _logsumexp(values_N: Tensor, of_term_N: Tensor, count: int) -> Tensor:
    """Compute the log-sum-exp of each unit's terms, [count]."""
    top_U = values_N.new_full((count,), -torch.inf).scatter_reduce(0, of_term_N, values_N.detach(), "amax")
    return top_U + values_N.new_zeros(count).index_add(0, of_term_N, (values_N - top_U[of_term_N]).exp()).log()
