"""Work units of similar lengths and about equal token counts, as a function of the lengths alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from actors.batching import balanced_batches
from actors.plan import RunPlan
from actors.spec import RunSpec
from learner.model.tokenizer import ChatTokenizer


def _cost(work_unit: Sequence[int], lengths: Sequence[int]) -> int:
    return len(work_unit) * max(lengths[group] for group in work_unit)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 9), st.integers(0, 9))
def test_every_group_is_in_one_work_unit_and_no_other_split_by_length_is_cheaper(
    lengths: list[int], size: int, more: int
) -> None:
    count, most = -(-len(lengths) // size), size + more
    work_units = balanced_batches(lengths, size, most)
    assert sorted(group for work_unit in work_units for group in work_unit) == list(range(len(lengths)))
    assert len(work_units) == count
    assert all(1 <= len(work_unit) <= most and list(work_unit) == sorted(work_unit) for work_unit in work_units)
    costs = [_cost(work_unit, lengths) for work_unit in work_units]
    if len(set(lengths)) == 1:
        return
    assert costs == sorted(costs, reverse=True)
    order = sorted(lengths, reverse=True)
    cuts = [(0, *inner, len(order)) for inner in combinations(range(1, len(order)), count - 1)]
    possible = [
        max((last - first) * order[first] for first, last in pairwise(cut))
        for cut in cuts
        if all(last - first <= most for first, last in pairwise(cut))
    ]
    assert max(costs) == min(possible)


def test_groups_of_one_length_stay_in_their_order() -> None:
    assert balanced_batches([7] * 5, 2, 4) == [(0, 1), (2, 3), (4,)]


def test_work_units_with_long_prompts_are_smaller() -> None:
    assert balanced_batches([10, 60, 10, 10, 12, 10], 3, 6) == [(1,), (0, 2, 3, 4, 5)]


def test_groups_are_sorted_by_prompt_length_but_replacement_groups_are_not(spec: RunSpec) -> None:
    rollout = spec.rollout.model_copy(update={"max_oversampling": 2.0})
    plan = RunPlan(spec.model_copy(update={"rollout": rollout}), ChatTokenizer(spec.initial_checkpoint))
    for index, problem in enumerate(plan.train):
        plan._prompts[problem.problem_id] = tuple(range(1 + index % 7))
    whole, size = spec.learner.groups_per_round, spec.learner.group_size
    for round_index in range(6):
        work_units = [
            plan.round_work_unit(round_index, index) for index in range(len(plan.work_unit_sizes(round_index)))
        ]
        first, later = work_units[: plan.work_units_per_round], work_units[plan.work_units_per_round :]
        assert sorted(group for work_unit in first for group in work_unit.group_ids[::size]) == list(range(whole))
        assert [group for work_unit in later for group in work_unit.group_ids[::size]] == list(range(whole, 2 * whole))
        lengths = [[len(request.prompt_ids) for request in work_unit.requests] for work_unit in first]
        # The length ranges of work units must not overlap.
        spans = sorted((min(some), max(some)) for some in lengths)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        for work_unit in work_units:
            for group, problem in zip(work_unit.group_ids, work_unit.problems, strict=True):
                assert plan._round_plan(round_index).problems[group][0] is problem
