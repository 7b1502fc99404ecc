"""Loss normalisation: the units that a ratio and a clip apply to, and their shares of a round's loss.

Shape letters: N terms, U units, B rows, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from learner.batch import to_device_async
from learner.estimators.groupings import Level
from learner.estimators.terms import Terms
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


class Normalize(StrEnum):
    """What a round's loss is a mean over."""

    ROUND = "round"
    """Mean over all units of the round, on all workers: equal weights, however the round is split."""
    GROUP = "group"
    """Mean over groups of each group's mean, as in d1, whose micro-batch on a worker is one group."""
    PART = "part"
    """Mean over the draws or segments of all completions of each one's mean (TraceRL, CJ-GRPO)."""
    ROW = "row"
    """Mean over completions of each one's mean."""
    ROW_SUM = "row_sum"
    """Mean over completions of each one's sum: no length normalisation (Dr. GRPO, arXiv 2503.20783)."""
    GROUP_SUM = "group_sum"
    """Mean over groups of each group's sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFacts:
    """Facts about the rows of a rank's shard that objectives need besides likelihoods."""

    advantages: Tensor
    """[B] float32."""
    groups: Tensor
    """[B] int64: 0, 1, ... over all groups of an optimizer step."""
    sizes: Tensor
    """[B] float32: completion slots that the estimator's value of the row covers; at least 1."""
    slot_advantages: Tensor | None = None
    """[B, L] float32: the advantage of each slot's commit, where a value model gives it; None: it does not."""
    step_advantages: Tensor | None = None
    """[B, T] float32: the advantage of each denoise step, or node of a rollout tree, by the number of its part; None:
    they have none of their own. Without both, `advantages` are those of all units."""
    sibling_targets: Tensor | None = None
    """[B, L, 2] float32: the weight of each slot's token in the consistency loss of a rollout tree, and its target
    log-probability in nats. Over all ranks the weights of an optimizer step add up to the loss's coefficient.
    None: there is no such loss."""
    log_weights: Tensor | None = None
    """[B] float32, nats: the reference's value of each row minus the old policy's, if the objective weighs rows."""
    correct: Tensor
    """[B] bool: the answer is right."""
    num_rows: int
    """Rows that the step trains on, over all ranks."""
    num_correct: int
    """The correct ones of these."""
    num_groups: int
    """Groups that the step trains on, over all ranks."""

    def on(self, device: torch.device) -> RowFacts:
        """Copy the tensors to a device."""
        moved: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in moved.items() if isinstance(value, torch.Tensor)}
        moved |= {name: to_device_async(tensor, device) for name, tensor in tensors.items()}
        return replace(self, **moved)

    def values(self, terms: Terms, values_N: Tensor) -> Tensor:
        """Return the weighted sum of each row's terms, [B]."""
        return torch.zeros_like(self.advantages).index_add(0, terms.rows, terms.weights * values_N)

    def advantages_of(self, terms: Terms, units: Units) -> Tensor:
        """Return the advantage of each unit, [U]: its row's, or the mean of its steps' or slots'."""
        if self.step_advantages is not None:
            of_term_N = self.step_advantages[terms.rows, terms.parts]
        elif self.slot_advantages is not None:
            of_term_N = self.slot_advantages[terms.rows, terms.slots]
        else:
            return self.advantages[units.rows]
        return units.sum(of_term_N) / units.sum(torch.ones_like(terms.weights))

    def shares(self, terms: Terms) -> Tensor:
        """Return the weight of each row in the loss, [B]; 0 for one without terms."""
        units = units_of(terms, Level.ROW)
        return torch.zeros_like(self.advantages).index_add(0, units.rows, units.importance)


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """The units of some terms."""

    of_term: Tensor
    """[N] int64: the unit of each term."""
    rows: Tensor
    """[U] int64: the row of each unit."""
    importance: Tensor
    """[U] float32: weight in the loss."""

    def sum(self, values_N: Tensor) -> Tensor:
        """Sum the terms' values over each unit, [U]."""
        return values_N.new_zeros(len(self.rows)).index_add(0, self.of_term, values_N)


def units_of(terms: Terms, level: Level) -> Units:
    """Group terms into the units of a level; a unit's importance is the mean over its terms."""
    grouping = terms.grouping(level)
    sums_U = terms.importance.new_zeros(len(grouping.rows)).index_add_(0, grouping.of_term, terms.importance)
    return Units(of_term=grouping.of_term, rows=grouping.rows, importance=sums_U / grouping.counts)


def normalized(
    terms: Terms, level: Level, normalize: Normalize, rows: RowFacts, over_ranks: Callable[[Tensor], Tensor]
) -> Terms:
    """Set the importance of terms to their unit's share of the round's loss.

    Args:
        terms: all terms of this rank.
        level: what a unit is.
        normalize: what the loss is a mean over.
        rows: the rank's rows.
        over_ranks: sums a tensor over all ranks.
    """
    units = units_of(terms, level)
    if normalize is Normalize.PART:
        parts = terms.laid_out.num_parts
        part_N = terms.rows * parts + terms.parts
        part_U = part_N.new_zeros(len(units.rows)).scatter_(0, units.of_term, part_N)
        divisor_U = _means(units.importance, part_U, len(rows.sizes) * parts, over_ranks)
    elif normalize is Normalize.ROW:
        divisor_U = _means(units.importance, units.rows, len(rows.sizes), None) * rows.num_rows
    elif normalize is Normalize.GROUP:
        by_group_G = units.importance.new_zeros(rows.num_groups)
        by_group_G = over_ranks(by_group_G.index_add_(0, rows.groups[units.rows], units.importance))
        divisor_U = by_group_G[rows.groups[units.rows]] * rows.num_groups
    else:
        count = {Normalize.ROW_SUM: rows.num_rows, Normalize.GROUP_SUM: rows.num_groups}.get(normalize)
        total = over_ranks(units.importance.sum()[None]) if count is None else units.importance.new_tensor([count])
        divisor_U = total.expand(len(units.rows))
    factor_U = torch.where(divisor_U > 0, 1 / divisor_U, 0.0)
    return replace(terms, importance=terms.importance * factor_U[units.of_term])


def _means(importance_U: Tensor, of_U: Tensor, count: int, over_ranks: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return each unit's divisor for a mean over sets of each set's mean, [U].

    It is the total importance of the unit's set, times the number of sets on all ranks if `over_ranks` is given.
    """
    sums = importance_U.new_zeros(count).index_add_(0, of_U, importance_U)
    num_sets = 1.0 if over_ranks is None else over_ranks((sums > 0).sum().float()[None])
    return sums[of_U] * num_sets


def group_softmax(values_B: Tensor, groups_B: Tensor, counts_B: Tensor, num_groups: int) -> Tensor:
    """Compute the softmax within each group over the rows in `counts_B`, [B]; 0 for other rows."""
    values_B = values_B.masked_fill(~counts_B, -torch.inf)
    top_G = values_B.new_full((num_groups,), torch.finfo(torch.float32).min)
    top_G = top_G.scatter_reduce(0, groups_B, values_B, "amax")
    powers_B = (values_B - top_G[groups_B]).exp()
    sums_G = powers_B.new_zeros(len(top_G)).index_add_(0, groups_B, powers_B)
    return powers_B / sums_G[groups_B].clamp(min=torch.finfo(torch.float32).tiny)
