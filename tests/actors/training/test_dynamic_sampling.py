"""Dynamic sampling (DAPO): groups are selected by their rewards, not by the order of answers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.training.dynamic_sampling import EVERY_GROUP, GroupSelection, graded_rows
from rewards import Grade, Outcome

SIZE = 4


def _grades(*rewards: float, outcome: Outcome = Outcome.GRADED) -> list[Grade]:
    return [Grade(reward=reward, parts={}, correct=reward == 1.0, outcome=outcome) for reward in rewards]


def _rows(*groups: list[Grade], first: int = 0) -> tuple[list[int], list[Grade]]:
    ids = [first + index for index, group in enumerate(groups) for _ in group]
    return ids, [grade for group in groups for grade in group]


TEACHES, ALL_RIGHT, ALL_WRONG = _grades(0.0, 0.5, 0.0, 1.0), _grades(*[1.0] * SIZE), _grades(*[0.0] * SIZE)


def test_uninformative_groups_are_left_out_and_the_first_informative_ones_taken() -> None:
    selection = GroupSelection(num_groups=2, max_groups=4)
    work_units = [_rows(ALL_RIGHT, TEACHES), _rows(TEACHES, TEACHES, first=2)]
    assert selection.trained_rows(work_units) == [[4, 5, 6, 7], [0, 1, 2, 3]]


def test_without_dynamic_sampling_all_groups_are_trained_on() -> None:
    work_units = [_rows(ALL_RIGHT, TEACHES), _rows(ALL_WRONG, first=2)]
    for selection in (EVERY_GROUP, GroupSelection(num_groups=3, max_groups=3)):
        assert selection.trained_rows(work_units) == [list(range(8)), list(range(4))]
        assert selection.work_units_needed([2, 1], {0: 0, 1: 0}) == 2


def test_a_group_with_too_few_grades_is_uninformative() -> None:
    failed = _grades(0.0, 1.0, outcome=Outcome.ERROR)
    rows = _rows([*_grades(0.5), *failed], [*_grades(0.5, 1.0), *failed])
    assert graded_rows(*rows) == [3, 4]
    assert GroupSelection(num_groups=1, max_groups=2).num_informative(rows) == 1


@pytest.mark.parametrize(
    ("low", "high", "num"), [(0.0, 1.0, 3), (0.3, 1.0, 2), (0.0, 0.6, 2), (0.25, 0.75, 3), (0.5, 0.5, 1)]
)
def test_groups_outside_the_accuracy_limits_are_uninformative(low: float, high: float, num: int) -> None:
    """With groups of accuracy 1/4, 1/2 and 3/4."""
    groups = [_grades(*[1.0] * count, *[0.0] * (SIZE - count)) for count in (1, 2, 3)]
    selection = GroupSelection(num_groups=3, max_groups=6, min_accuracy=low, max_accuracy=high)
    assert selection.num_informative(_rows(*groups)) == num


@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=3), min_size=1, max_size=8),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
)
@settings(max_examples=300)
def test_the_requested_work_units_do_not_depend_on_the_order_of_answers(
    work_units: list[list[bool]], num_groups: int, order: random.Random
) -> None:
    """Requests the shortest prefix with enough informative groups, or all work units, and never a unit in vain."""
    sizes, informative = [len(work_unit) for work_unit in work_units], [sum(work_unit) for work_unit in work_units]
    selection = GroupSelection(num_groups=num_groups, max_groups=sum(sizes))
    enough = (count for count in range(len(work_units) + 1) if sum(informative[:count]) >= num_groups)
    expected = next(enough, len(work_units))
    known: dict[int, int] = {}
    asked = selection.work_units_needed(sizes, known)
    while open_ := [index for index in range(asked) if index not in known]:
        index = order.choice(open_)
        known[index] = informative[index]
        now = selection.work_units_needed(sizes, known)
        assert now >= asked
        asked = now
    assert asked == expected
