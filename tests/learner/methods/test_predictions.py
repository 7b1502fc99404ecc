"""The estimator `predictions`: which steps it takes, what it scores, the advantages of steps, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from learner.advantages import Rewards, prediction_advantages
from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import Corruption, InnerUpdate, PredictionsConfig, SamplerFacts
from learner.learner import Learner
from learner.model.transformer import Transformer
from learner.parallel.sharding import ShardedPolicy
from tests.learner.methods.test_algorithms import algorithm_config, algorithm_sampler

NAN = float("nan")


def _corruption(batch: GroupedBatch, advantages: Tensor | None, num_states: int = 2) -> Corruption:
    graded = replace(batch, step_advantages=advantages)
    return PredictionsConfig(num_states=num_states).corrupt(graded, InnerUpdate(0, 1), SamplerFacts(temperature=0.5))


def test_the_steps_of_largest_advantage_in_either_direction_are_trained(grouped: GroupedBatch) -> None:
    advantages = torch.tensor([0.5, -2.0, 0.25, 1.0]).repeat(12, 1)
    advantages[1] = torch.tensor([1.0, -1.0, 1.0, 1.0])
    found = _corruption(grouped, advantages)
    assert found.parts is not None
    assert found.parts[found.rows == 0].tolist() == [1, 3]
    assert found.parts[found.rows == 1].tolist() == [0, 1], "of equal ones the earlier"
    assert found.rows.bincount().tolist() == [2] * 12
    assert _corruption(grouped, None).parts.tolist() == [0, 1] * 12  # type: ignore[union-attr]
    assert len(_corruption(grouped, advantages, num_states=9).rows) == 4 * 12


def test_all_predictions_of_a_state_are_scored(grouped: GroupedBatch) -> None:
    """Those of later blocks too, under the sampler's distribution; slots without a record are not."""
    assert grouped.step_answers is not None
    answers = grouped.step_answers.clone()
    answers[:, :, 7] = -1
    found = _corruption(replace(grouped, step_answers=answers), None)
    for row, step, masked, scored, targets in zip(
        found.rows.tolist(),
        found.parts,
        found.masked,
        found.scored,
        found.targets,
        strict=True,  # type: ignore[arg-type]
    ):
        of_row = grouped.step_map[row]
        assert torch.equal(masked, (of_row < 0) | (of_row >= step))
        assert scored.tolist() == [*masked[:7].tolist(), False]
        assert torch.equal(targets[scored], answers[row, int(step)][scored].long())
    assert (found.distribution.temperature, found.distribution.excludes_mask_id) == (0.5, True)


def test_steps_without_a_grade_and_rows_that_pad_a_shard_are_not_trained(grouped: GroupedBatch) -> None:
    assert grouped.step_rewards is not None
    rewards = grouped.step_rewards.clone()
    rewards[0, 1:] = NAN
    found = _corruption(replace(grouped, step_rewards=rewards), torch.ones(12, 4))
    assert found.parts is not None
    assert found.parts[found.rows == 0].tolist() == [0]
    empty = replace(grouped, step_advantages=torch.ones(12, 4)).empty_row()
    assert len(PredictionsConfig().corrupt(empty, InnerUpdate(0, 1), SamplerFacts()).rows) == 0


def _advantages(rewards: list[float], of_steps: list[list[float]], num_steps: int) -> Tensor:
    total = torch.tensor(rewards)
    group = Rewards(
        total=total,
        parts=total[:, None],
        correct=total > 0,
        groups=torch.zeros(len(rewards), dtype=torch.int64),
    )
    return prediction_advantages(group, torch.tensor(of_steps), num_steps)


def test_a_steps_return_is_its_gain_and_the_mean_of_later_rewards() -> None:
    # Returns: 0 + 1/2, 0 + 1, 1 + 1; and 1 - 0 + 0, -1 + 0, 0 + 0.
    found = _advantages([1.0, 0.0], [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], 3)
    returns = torch.tensor([[0.5, 1.0, 2.0], [1.0, -1.0, 0.0]])
    # Two values lie 1 / sqrt(2) standard deviations from their mean.
    expected = (returns - returns.mean(dim=0)) / (returns.std(dim=0) + 1e-4)
    torch.testing.assert_close(found, expected)
    assert found[0, 2] == pytest.approx(2**-0.5, abs=1e-3)


def test_steps_after_a_text_and_ungraded_answers_count_with_the_completions_reward() -> None:
    cut = _advantages([1.0, 0.0], [[0.0, NAN, NAN], [1.0, NAN, 0.0]], 4)
    whole = _advantages([1.0, 0.0], [[0.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]], 4)
    assert torch.equal(cut, torch.where(torch.tensor([[1, 0, 0], [1, 0, 1]]) > 0, whole[:, :3], 0.0))


def test_equal_returns_and_single_completions_have_no_advantage() -> None:
    assert _advantages([1.0, 1.0], [[0.0, 1.0], [0.0, 1.0]], 2).tolist() == [[0.0, 0.0]] * 2
    assert _advantages([1.0], [[0.0]], 1).tolist() == [[0.0]]


def test_advantages_are_of_whole_groups_whatever_is_trained(policy: Transformer, rollouts: RolloutBatch) -> None:
    """Filters leave completions out after their group is compared."""
    truncated = torch.zeros(12, dtype=torch.bool)
    truncated[::4] = True
    batch = replace(rollouts, truncated=truncated)
    config = algorithm_config("mdpo", filters={"truncated": True}, inner_updates=1)
    metrics = Learner(ShardedPolicy(policy, None), config, algorithm_sampler("mdpo")).update(batch, 0)
    assert metrics["num_trained_completions"] == 9
    assert metrics["ratio_mean"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"objective": {"level": "token"}},
            "weigh_by_confidence and weigh_by_unmasking need level: canvas_token; .* a token",
        ),
        (
            {"objective": {"level": "part", "weigh_by_confidence": False}},
            "weigh_by_confidence and weigh_by_unmasking need level: canvas_token; .* a part",
        ),
        (
            {"objective": {"level": "part", "weigh_by_confidence": False, "weigh_by_unmasking": False}},
            "estimator predictions needs objective clipped_ratio with level: canvas_token",
        ),
        ({"objective": {"name": "weighted_likelihood"}}, "estimator predictions needs objective clipped_ratio"),
        ({"advantage": "group_mean"}, "estimator predictions needs advantage group_z, and it is group_mean"),
        ({"step_gain_coef": 0.5}, "step_gain_coef needs estimator trajectory"),
        ({"max_staleness": 1}, "max_staleness is 1"),
        ({"objective": {"old": "sampler"}}, "objective.old is sampler: the estimator must be trajectory"),
        ({"value": {}}, "value needs estimator trajectory"),
        ({"estimator": {"num_states": 0}}, "greater than 0"),
    ],
)
def test_contradictory_settings_are_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        LearnerConfig.model_validate({"algorithm": "mdpo", "num_rounds": 1, **changes})


def test_samplers_that_predict_part_of_the_canvas_or_vary_in_steps_are_refused() -> None:
    config = LearnerConfig.model_validate({"algorithm": "mdpo", "num_rounds": 1})
    assert config.incompatibility(SamplerFacts()) is None
    assert "whole canvas: a bidirectional policy, and rollout.sampling.cache none" in str(
        config.incompatibility(SamplerFacts(predicts_canvas=False))
    )
    assert "leave out threshold" in str(config.incompatibility(SamplerFacts(has_varying_steps=True)))
