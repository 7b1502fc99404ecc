"""Units: what a ratio, a clip and a penalty apply to, and the share of each in a round's loss.

Shape letters: N terms, U units, B rows, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from learner.batch import uploaded
from learner.estimators.groupings import Level
from learner.estimators.terms import Terms
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


class Normalize(StrEnum):
    """What a round's loss is a mean over."""

    ROUND = "round"
    """All units of the round, on all workers: each weighs the same, however the round is split."""
    GROUP = "group"
    """The groups, of each group's mean: d1's, whose micro-batch on a worker is one group."""
    PART = "part"
    """The draws or segments of all completions, of each one's mean: each counts alike (TraceRL, CJ-GRPO)."""
    ROW = "row"
    """The completions, of each one's mean."""
    ROW_SUM = "row_sum"
    """The completions, of each one's sum: no length normalisation (Dr. GRPO, arXiv 2503.20783)."""
    GROUP_SUM = "group_sum"
    """The groups, of each group's sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFacts:
    """What an objective knows of the rows of a rank's shard, besides their likelihoods."""

    advantages: Tensor
    """[B] float32."""
    groups: Tensor
    """[B] int64: 0, 1, ... over all that an optimizer step trains on."""
    sizes: Tensor
    """[B] float32: completion slots that the estimator's value of the row covers; at least 1."""
    log_weights: Tensor | None = None
    """[B] float32, nats: the reference's value of each row less the old policy's, where the objective weighs rows."""
    correct: Tensor
    """[B] bool: the answer is right."""
    num_rows: int
    """Rows that the step trains on, over all ranks."""
    num_correct: int
    """Correct ones of these."""
    num_groups: int
    """Groups that the step trains on, over all ranks."""

    def on(self, device: torch.device) -> RowFacts:
        """The same on a device."""
        moved: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in moved.items() if isinstance(value, torch.Tensor)}
        moved |= {name: uploaded(tensor, device) for name, tensor in tensors.items()}
        return replace(self, **moved)

    def values(self, terms: Terms, values_N: Tensor) -> Tensor:
        """[B] the weighted sum of each row's terms."""
        return torch.zeros_like(self.advantages).index_add(0, terms.rows, terms.weights * values_N)

    def shares(self, terms: Terms) -> Tensor:
        """[B] what each row counts for in the loss; 0 for one without terms."""
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
    """[U] float32: what it counts for in the loss."""

    def sum(self, values_N: Tensor) -> Tensor:
        """[U] the sums of the terms' values."""
        return values_N.new_zeros(len(self.rows)).index_add(0, self.of_term, values_N)


def units_of(terms: Terms, level: Level) -> Units:
    """The units of some terms at a level; a unit counts for as much as its terms do on average."""
    grouping = terms.grouping(level)
    sums_U = terms.importance.new_zeros(len(grouping.rows)).index_add_(0, grouping.of_term, terms.importance)
    return Units(of_term=grouping.of_term, rows=grouping.rows, importance=sums_U / grouping.counts)


def normalized(
    terms: Terms, level: Level, normalize: Normalize, rows: RowFacts, over_ranks: Callable[[Tensor], Tensor]
) -> Terms:
    """The terms with their importance made their unit's share of the round's loss.

    Args:
        terms: all of this rank.
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
    """[U] what divides a unit so that each of `count` sets counts alike; times how many there are over all ranks."""
    sums = importance_U.new_zeros(count).index_add_(0, of_U, importance_U)
    num_sets = 1.0 if over_ranks is None else over_ranks((sums > 0).sum().float()[None])
    return sums[of_U] * num_sets


def group_softmax(values_B: Tensor, groups_B: Tensor, counts_B: Tensor, num_groups: int) -> Tensor:
    """[B] softmax within each group, of the rows that count; 0 elsewhere."""
    values_B = values_B.masked_fill(~counts_B, -torch.inf)
    top_G = values_B.new_full((num_groups,), torch.finfo(torch.float32).min)
    top_G = top_G.scatter_reduce(0, groups_B, values_B, "amax")
    powers_B = (values_B - top_G[groups_B]).exp()
    sums_G = powers_B.new_zeros(len(top_G)).index_add_(0, groups_B, powers_B)
    return powers_B / sums_G[groups_B].clamp(min=torch.finfo(torch.float32).tiny)
