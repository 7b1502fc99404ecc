from dataclasses import replace

import pytest
import torch

from learner.advantages import Advantage, group_advantages
from learner.batch import RolloutBatch
from learner.estimators import OneStep, OneStepConfig, token_logps
from learner.learner import Learner, LearnerConfig
from learner.model.transformer import Transformer
from learner.objectives import ClippedRatioConfig, clipped_ratio
from learner.sharding import ShardedPolicy


def _config(**changes: object) -> LearnerConfig:
    settings: dict[str, object] = {
        "num_rounds": 1,
        "group_size": 4,
        "groups_per_round": 3,
        "inner_updates": 2,
        "micro_batch_size": 5,
        "lr": 1e-2,
        "max_grad_norm": 1e9,
    }
    return LearnerConfig(**settings | changes)  # type: ignore[arg-type]


def test_update_is_that_of_the_whole_batch_at_once(policy: Transformer, rollouts: RolloutBatch) -> None:
    """The slow reference: no micro-batches, no shards, old values from a copy of the policy."""
    config = _config()
    slow = Transformer(policy.config)
    slow.load_state_dict(policy.state_dict())
    old_policy = Transformer(policy.config)
    old_policy.load_state_dict(policy.state_dict())
    estimator = OneStep(config.estimator, policy.config)
    advantages = group_advantages(rollouts.rewards, rollouts.group_ids, Advantage.GROUP_MEAN)
    per_token = advantages[:, None].expand(-1, 8)[rollouts.completion_mask()]
    optimizer = torch.optim.AdamW(slow.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for update in range(2):
        views = estimator.plan(rollouts, update)
        new = token_logps(slow, views)
        with torch.no_grad():
            old = token_logps(old_policy, views)
        terms = clipped_ratio(config.objective, new, old, old, per_token)
        optimizer.zero_grad()
        (terms.loss.sum() / int(rollouts.completion_lengths.sum())).backward()
        optimizer.step()
    Learner(ShardedPolicy(policy, None), config).update(rollouts, 0)
    for (name, fast), (_, expected) in zip(policy.named_parameters(), slow.named_parameters(), strict=True):
        # A hundredth of a step: AdamW divides by the gradient, and where that is almost 0 its rounding shows.
        torch.testing.assert_close(fast, expected, atol=1e-4, rtol=0, msg=name)


def test_good_completions_become_likelier_and_bad_ones_less(policy: Transformer, rollouts: RolloutBatch) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0] * 3)
    batch = replace(rollouts, rewards=rewards)
    config = _config(estimator=OneStepConfig(p_mask_prompt=0.0), objective=ClippedRatioConfig(kl_coef=0.0), lr=1e-3)
    learner = Learner(ShardedPolicy(policy, None), config)

    def gap() -> float:
        views = OneStep(config.estimator, policy.config).plan(batch, 0)
        good = (rewards[:, None] > 0).expand(-1, 8)[batch.completion_mask()]
        with torch.no_grad():
            values = token_logps(policy, views)
        return (values[good].mean() - values[~good].mean()).item()

    before = gap()
    for round_index in range(5):
        learner.update(batch, round_index)
    assert gap() > before + 0.1


def test_equal_rewards_leave_the_policy_alone(policy: Transformer, rollouts: RolloutBatch) -> None:
    config = _config(objective=ClippedRatioConfig(kl_coef=0.0), weight_decay=0.0)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    metrics = Learner(ShardedPolicy(policy, None), config).update(replace(rollouts, rewards=torch.ones(12)), 0)
    assert metrics["zero_variance_share"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


def test_the_reference_moves_only_when_the_recipe_says_so(policy: Transformer, rollouts: RolloutBatch) -> None:
    for every, expected_round in ((0, None), (2, 2)):
        learner = Learner(ShardedPolicy(policy, None), _config(reference_sync_rounds=every))
        assert learner.reference is not None
        start = learner.reference.full_weights()
        for round_index in range(2):
            learner.update(rollouts, round_index)
            moved = not torch.equal(learner.reference.full_weights()["head.weight"], start["head.weight"])
            assert moved == (expected_round == round_index + 1)


def test_kl_starts_at_zero_and_grows(policy: Transformer, rollouts: RolloutBatch) -> None:
    learner = Learner(ShardedPolicy(policy, None), _config(inner_updates=1))
    assert learner.update(rollouts, 0)["kl"] == pytest.approx(0, abs=1e-7)
    assert learner.update(rollouts, 1)["kl"] > 1e-6


def test_a_gradient_that_is_not_finite_stops_training_and_spares_the_policy(
    policy: Transformer, rollouts: RolloutBatch
) -> None:
    before = policy.head.weight.clone()
    learner = Learner(ShardedPolicy(policy, None), _config())
    with pytest.raises(FloatingPointError, match="training stops"):
        learner.update(replace(rollouts, rewards=torch.tensor([float("inf")] * 12)), 0)
    assert torch.equal(policy.head.weight, before)


def test_micro_batch_normalization_weighs_tokens_unequally(policy: Transformer, rollouts: RolloutBatch) -> None:
    """d1's way is there by name, and is another gradient than the default."""
    losses = []
    for normalization in ("round", "micro_batch"):
        model = Transformer(policy.config)
        model.load_state_dict(policy.state_dict())
        objective = ClippedRatioConfig(normalize_by=normalization)  # type: ignore[arg-type]
        learner = Learner(ShardedPolicy(model, None), _config(objective=objective, inner_updates=1))
        losses.append(learner.update(rollouts, 0)["grad_norm"])
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
