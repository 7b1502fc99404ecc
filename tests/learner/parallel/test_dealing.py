"""Dealing rows to ranks: a partition, balanced by tokens, that keeps neighbours together where that costs nothing."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.batch import GroupedBatch
from learner.estimators import InnerUpdate, OneStepConfig, SamplerFacts, TrajectoryConfig, make_terms
from learner.estimators.base import Estimator
from learner.model.config import TransformerConfig
from learner.parallel.dealing import RowCosts, deal, largest_share, view_tokens

GROUPS_OF_FOUR = tuple(row // 4 for row in range(12))


def _costs(own: list[int], size: int = 4, shared: int = 0) -> RowCosts:
    return RowCosts(own=own, groups=[row // size for row in range(len(own))], shared=[shared] * len(own))


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=20),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(0, 30),
    st.booleans(),
)
def test_ranks_partition_the_rows(own: list[int], num_ranks: int, size: int, shared: int, whole_groups: bool) -> None:
    costs = _costs(own, size, shared)
    shares = deal(costs, num_ranks, whole_groups=whole_groups)
    assert len(shares) == num_ranks
    assert sorted(row for share in shares for row in share) == list(range(len(own)))
    assert all(share == sorted(share) for share in shares)
    if whole_groups:
        assert sum(len({costs.groups[row] for row in share}) for share in shares) == len(set(costs.groups))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(2, 3))
def test_the_largest_share_is_close_to_the_smallest_possible_one(own: list[int], num_ranks: int) -> None:
    """Graham's bound for longest-processing-time first, and the 2 % for which neighbours stay together."""
    costs = RowCosts.of_lengths(own)
    fewest = min(
        max(sum(own[row] for row, chosen in enumerate(ranks) if chosen == rank) for rank in range(num_ranks))
        for ranks in product(range(num_ranks), repeat=len(own))
    )
    most = largest_share(deal(costs, num_ranks), costs)
    assert most <= (4 / 3 - 1 / (3 * num_ranks)) * fewest / 0.98 + 1e-9


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 12])
def test_equal_rows_stay_with_their_neighbours(num_ranks: int) -> None:
    shares = deal(_costs([7] * 12), num_ranks)
    assert [row for share in shares for row in share] == list(range(12))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("num_ranks", "whole_groups", "sizes"), [(3, True, [8, 4, 4]), (3, False, [6, 5, 5])])
def test_no_rank_is_idle_where_numbers_do_not_divide(num_ranks: int, whole_groups: bool, sizes: list[int]) -> None:
    """Four groups of four on three ranks; two neighbouring groups each would leave the third rank without any."""
    shares = deal(_costs([5] * 16), num_ranks, whole_groups=whole_groups)
    assert sorted(map(len, shares), reverse=True) == sizes


def test_rows_that_share_a_canvas_stay_together_if_that_is_less_work() -> None:
    """Six rows each of two groups, which share all but one token: separated, every rank would run both canvases."""
    costs = _costs([1] * 12, size=6, shared=100)
    assert [[costs.groups[row] for row in share] for share in deal(costs, 2)] == [[0] * 6, [1] * 6]


def test_long_rows_are_dealt_to_different_ranks() -> None:
    assert deal(RowCosts.of_lengths([90, 80, 10, 10, 10, 10]), 2) == [[0, 3, 5], [1, 2, 4]]


ESTIMATORS: dict[str, Estimator] = {
    "a canvas each": OneStepConfig(),
    "one canvas of a group": OneStepConfig(p_mask_prompt=0),
    "a canvas for each step": TrajectoryConfig(steps_per_segment=1),
}


@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
def test_tokens_equal_those_of_planned_views(
    grouped: GroupedBatch, config: TransformerConfig, estimator: Estimator
) -> None:
    """Counted in a loop over the views of each rank's own plan."""
    corruption = estimator.corrupt(grouped, InnerUpdate(0, 1), SamplerFacts(block_length=4))
    own, shared = view_tokens(make_terms(grouped, config, corruption, 4), grouped.group_index)
    costs = RowCosts(own=own.tolist(), groups=GROUPS_OF_FOUR, shared=shared.tolist())
    whole = [list(range(12)), [0, 1, 2, 3], list(range(4, 12))]
    # Part of a group may not share what the group shares, except a canvas that shows the prompt only.
    for rows in [*whole, [0], [2, 3, 7]] if estimator == OneStepConfig(p_mask_prompt=0) else whole:
        some = grouped.select(torch.tensor(rows))
        of_rank = make_terms(some, config, estimator.corrupt(some, InnerUpdate(0, 1), SamplerFacts(block_length=4)), 4)
        assert costs.of(rows) == sum(of_rank.views.lengths.tolist())
