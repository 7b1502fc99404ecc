"""Dealing rows to ranks, balanced by tokens.

All ranks of FSDP wait for the one with the most work. Rows differ in length, and in the number of their canvases. So
rows are dealt by longest-processing-time-first scheduling (Graham, 1969): the longest first, each to the rank with the
fewest tokens so far. The largest share is at most 4/3 of the smallest possible one.

Shape letters: B rows, N terms, P pairs of a view and a row that it serves.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

    from learner.estimators.terms import Terms

_LEAST_GAIN = 0.02
"""Neighbouring rows are separated only if this lowers the largest share by as much: they need less padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCosts:
    """The tokens that a rank runs for the rows it holds."""

    own: Sequence[int]
    """Tokens of each row's own canvases."""
    groups: Sequence[int]
    """The group of each row, ascending."""
    shared: Sequence[int]
    """Tokens of the canvases that the rows of each row's group share. A rank runs them once."""

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> Self:
        """Return the costs of rows that share nothing."""
        return cls(own=lengths, groups=range(len(lengths)), shared=[0] * len(lengths))

    def of(self, rows: Sequence[int]) -> int:
        """Return the tokens that a rank with these rows runs."""
        of_groups = {self.groups[row]: self.shared[row] for row in rows}
        return sum(self.own[row] for row in rows) + sum(of_groups.values())

    @property
    def total(self) -> int:
        """The tokens that a single rank with all rows runs: the ranks together run at least as many."""
        return self.of(range(len(self.own)))


def deal(costs: RowCosts, num_ranks: int, *, whole_groups: bool = False) -> list[list[int]]:
    """Return the rows of each rank, ascending; a pure function, so all ranks find the same.

    There are three candidates: equally many neighbouring rows, groups dealt by tokens, and rows dealt by tokens. The
    last separates rows that share canvases, and is not allowed with `whole_groups`. The largest share decides. Ranks
    have no rows only if there are fewer rows, or groups, than ranks.
    """
    rows = [[row] for row in range(len(costs.own))]
    groups = _grouped(costs.groups)
    neighbours = _neighbours(groups if whole_groups else rows, num_ranks)
    enough = (1 - _LEAST_GAIN) * largest_share(neighbours, costs)
    if costs.total / num_ranks > enough:
        return neighbours  # Even equal shares would gain too little.
    dealt = [_longest_first(groups, costs, num_ranks)] if whole_groups or len(groups) >= num_ranks else []
    if not whole_groups:
        dealt.append(_longest_first(rows, costs, num_ranks))
    best = min(dealt, key=lambda shares: largest_share(shares, costs))
    return best if largest_share(best, costs) <= enough else neighbours


def largest_share(shares: Sequence[Sequence[int]], costs: RowCosts) -> int:
    """Return the tokens of the rank with the most."""
    return max(map(costs.of, shares))


def view_tokens(terms: Terms, group_B: Tensor) -> tuple[Tensor, Tensor]:
    """Count the tokens of each row's own views, and of those that its group shares: [B] int64 each.

    Args:
        terms: of whole groups.
        group_B: [B] int64: the group of each row.
    """
    num_rows, width = len(group_B), terms.views.ids.shape[1]
    view_N = terms.views.slots[terms.views.scored] // width
    pair_P = (view_N * num_rows + terms.rows).unique()
    view_P, row_P = pair_P // num_rows, pair_P % num_rows
    tokens_P = terms.views.lengths[view_P]
    is_shared_P = view_P.bincount()[view_P] > 1
    own_B = group_B.new_zeros(num_rows).index_add(0, row_P, tokens_P * ~is_shared_P)
    # A shared view counts once, for the group of its first row.
    is_first_P = torch.ones_like(is_shared_P)
    is_first_P[1:] = view_P[1:] != view_P[:-1]
    of_group = group_B.new_zeros(int(group_B.max()) + 1)
    of_group.index_add_(0, group_B[row_P], tokens_P * (is_shared_P & is_first_P))
    return own_B, of_group[group_B]


def _grouped(groups: Sequence[int]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        found.setdefault(group, []).append(row)
    return list(found.values())


def _neighbours(units: list[list[int]], num_ranks: int) -> list[list[int]]:
    """Deal equally many neighbouring units to each rank."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for index, unit in enumerate(units):
        shares[index * num_ranks // max(num_ranks, len(units))] += unit
    return shares


def _longest_first(units: list[list[int]], costs: RowCosts, num_ranks: int) -> list[list[int]]:
    """Deal the longest units first, each to the rank with the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    held: list[set[int]] = [set() for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    # Sorting is stable: of two equally long units the earlier comes first.
    for unit in sorted(units, key=costs.of, reverse=True):
        load, rank = heapq.heappop(loads)
        group = costs.groups[unit[0]]
        shared = 0 if group in held[rank] else costs.shared[unit[0]]
        held[rank].add(group)
        shares[rank] += unit
        heapq.heappush(loads, (load + sum(costs.own[row] for row in unit) + shared, rank))
    return [sorted(share) for share in shares]
