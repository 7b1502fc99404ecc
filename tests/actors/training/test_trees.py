"""Rollout trees of a run: planned by shared seeds, and collated by what completions really share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.messages import ScoredWorkUnit, WorkUnit, WorkUnitSummary
from actors.plan import RunPlan
from actors.spec import RunSpec
from actors.training.collate import collate
from actors.training.dynamic_sampling import EVERY_GROUP
from learner.advantages import Advantage, Rewards
from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.model.checkpoint import load_policy
from learner.model.tokenizer import ChatTokenizer
from learner.tree.config import inner_nodes
from learner.tree.nodes import node_advantages
from rewards import Grade
from rewards.problem import Outcome
from rollout.request import Completion
from rollout.sampler import Sampler

REWARDS = [0.0, 1.0, 2.0, 3.0, 4.0, 9.0]


@pytest.fixture
def of_trees(spec: RunSpec) -> RunSpec:
    """The run with trees of two nodes of three leaves."""
    settings = {"algorithm": "d-treerpo", "num_rounds": 2, "groups_per_round": 5, "group_size": 6}
    learner = LearnerConfig.model_validate(settings | {"estimator": {"branches": [2, 3]}})
    return spec.model_copy(update={"learner": learner})


@pytest.fixture
def work_unit(of_trees: RunSpec) -> WorkUnit:
    return RunPlan(of_trees, ChatTokenizer(of_trees.initial_checkpoint)).round_work_unit(0, 0)


@pytest.fixture
def completions(of_trees: RunSpec, work_unit: WorkUnit) -> list[Completion]:
    return Sampler(load_policy(of_trees.initial_checkpoint), 0).generate(work_unit.requests)


def _collated(
    work_unit: WorkUnit, completions: Sequence[Completion], lost: frozenset[int] = frozenset()
) -> RolloutBatch:
    grades = [
        Grade(
            reward=REWARDS[row % 6],
            parts={},
            correct=False,
            outcome=Outcome.TIMEOUT if row in lost else Outcome.GRADED,
        )
        for row in range(len(completions))
    ]
    summary = WorkUnitSummary.of(completions, grades, [""] * len(grades), {})
    scored = ScoredWorkUnit(work_unit=work_unit, completions=tuple(completions), summary=summary)
    batch = collate([scored], len(completions[0].token_ids), (1,), EVERY_GROUP)
    assert batch is not None
    return batch


def _nodes(batch: RolloutBatch) -> list[int]:
    """Return the first level's node of each row of the first group, counted from 0."""
    assert batch.node_keys is not None
    keys = batch.node_keys[batch.group_ids == batch.group_ids[0], 0].tolist()
    return [list(dict.fromkeys(keys)).index(key) for key in keys]


def test_leaves_know_the_nodes_that_they_descend_from() -> None:
    assert [inner_nodes((2, 3), leaf) for leaf in range(6)] == [[0], [0], [0], [1], [1], [1]]
    assert [inner_nodes((2, 2, 2), leaf) for leaf in (0, 1, 2, 5, 7)] == [[0, 0], [0, 0], [0, 1], [1, 2], [1, 3]]
    assert inner_nodes((4,), 3) == inner_nodes((), 3) == []


def test_only_methods_of_trees_share_seeds(spec: RunSpec, of_trees: RunSpec, work_unit: WorkUnit) -> None:
    plain = RunPlan(spec, ChatTokenizer(spec.initial_checkpoint)).round_work_unit(0, 0)
    assert {request.node_seeds for request in plain.requests} == {()}
    seeds = [request.node_seeds for request in work_unit.requests]
    assert [len(set(seeds[first : first + 3])) for first in range(0, len(seeds), 3)] == [1] * (len(seeds) // 3)
    assert len(set(seeds)) == len(seeds) // 3, "of no other node, problem or epoch"
    assert len({request.seed for request in work_unit.requests}) == len(seeds)


def test_completions_of_a_node_are_equal_up_to_it(work_unit: WorkUnit, completions: list[Completion]) -> None:
    half = work_unit.requests[0].steps_per_level
    shown = [tuple(np.where(one.step_map < half, one.token_ids, -1)[:4]) for one in completions]
    assert [len(set(shown[first : first + 3])) for first in range(0, len(shown), 3)] == [1] * (len(shown) // 3)
    assert _nodes(_collated(work_unit, completions)) == [0, 0, 0, 1, 1, 1]


def test_lost_completions_do_not_move_the_others(work_unit: WorkUnit, completions: list[Completion]) -> None:
    """Of the second node two leaves are left: its value is their mean."""
    batch = _collated(work_unit, completions, lost=frozenset({1, 3}))
    assert _nodes(batch) == [0, 0, 1, 1]
    assert batch.node_keys is not None
    first = batch.group_ids == batch.group_ids[0]
    found = node_advantages(Rewards.of(batch), batch.node_keys, Advantage.LEAVE_ONE_OUT)[first]
    expected = [[1 - 6.5, 0 - 2], [1 - 6.5, 2 - 0], [6.5 - 1, 4 - 9], [6.5 - 1, 9 - 4]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))


def test_a_node_whose_siblings_are_lost_has_no_advantage(work_unit: WorkUnit, completions: list[Completion]) -> None:
    batch = _collated(work_unit, completions, lost=frozenset({2, 4, 5}))
    assert _nodes(batch) == [0, 0, 1]
    assert batch.node_keys is not None
    first = batch.group_ids == batch.group_ids[0]
    found = node_advantages(Rewards.of(batch), batch.node_keys, Advantage.LEAVE_ONE_OUT)[first]
    torch.testing.assert_close(found, torch.tensor([[-2.5, -1.0], [-2.5, 1.0], [2.5, 0.0]]))


def test_a_completion_that_rounding_led_elsewhere_is_another_child(
    work_unit: WorkUnit, completions: list[Completion]
) -> None:
    early = int((completions[4].step_map == 0).argmax())
    tokens = completions[4].token_ids.copy()
    tokens[early] += 1 if tokens[early] < 10 else -1
    moved = [*completions[:4], replace(completions[4], token_ids=tokens), *completions[5:]]
    batch = _collated(work_unit, moved)
    assert _nodes(batch) == [0, 0, 0, 1, 2, 1]
    grouped = GroupedBatch.of(batch)
    assert grouped.owns_node is not None
    assert grouped.owns_node[:6].tolist() == [[own, True] for own in (True, False, False, True, True, False)]
    assert batch.node_keys is not None
    found = node_advantages(Rewards.of(batch), batch.node_keys, Advantage.LEAVE_ONE_OUT)[:6]
    # Values 1, 6 and 4: the mean over the nodes, not over their leaves.
    torch.testing.assert_close(found[:, 0], torch.tensor([1 - 5, 1 - 5, 1 - 5, 6 - 2.5, 4 - 3.5, 6 - 2.5]))
    assert found[4, 1] == 0


def test_the_value_of_a_node_is_the_mean_of_its_childrens() -> None:
    """Three levels: of the first node one leaf and one node of three leaves, of the second one a single leaf."""
    keys = torch.tensor([[1, 1, 1], [1, 2, 2], [1, 2, 3], [1, 2, 4], [2, 3, 5]])
    rewards = torch.tensor([8.0, 0.0, 1.0, 5.0, 3.0])
    none = torch.zeros(5)
    of = Rewards(total=rewards, parts=none[:, None], correct=none > 0, groups=torch.zeros(5, dtype=torch.int64))
    found = node_advantages(of, keys, Advantage.LEAVE_ONE_OUT)
    first, second = (8 + 2) / 2 - 3, 8.0 - 2.0
    expected = [
        [first, second, 0.0],
        [first, -second, 0 - 3],
        [first, -second, 1 - 2.5],
        [first, -second, 5 - 0.5],
        [-first, 0.0, 0.0],
    ]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_equal_siblings_are_two_nodes(work_unit: WorkUnit, completions: list[Completion]) -> None:
    batch = _collated(work_unit, [completions[0]] * 6 + completions[6:])
    assert _nodes(batch) == [0, 0, 0, 1, 1, 1]
