from dataclasses import replace

import torch

from learner.batch import CompletionBatch, RolloutBatch
from learner.model.transformer import Transformer
from learner.sft import SftConfig, plan_sft, sft_rows
from learner.sft_learner import SftLearner
from learner.sharding import ShardedPolicy


def _labels(rollouts: RolloutBatch, rows: int = 12) -> CompletionBatch:
    batch = rollouts.select(slice(0, rows))
    names = ("prompt_ids", "prompt_lengths", "completion_ids", "completion_lengths", "sample_keys")
    return CompletionBatch(**{name: getattr(batch, name) for name in names})


def test_each_epoch_is_a_permutation_of_all_labels() -> None:
    rows = torch.cat([sft_rows(10, 4, step, seed=1) for step in range(5)])
    assert sorted(rows[:10].tolist()) == list(range(10))
    assert sorted(rows[10:].tolist()) == list(range(10))
    assert rows[:10].tolist() != rows[10:].tolist()


def test_prompts_are_never_masked_and_masked_slots_are_the_scored_ones(
    policy: Transformer, rollouts: RolloutBatch
) -> None:
    mask_id = policy.config.mask_token_id
    views, _ = plan_sft(_labels(rollouts), policy.config, step=0, seed=0)
    assert not (views.ids[:, :4] == mask_id).any()
    assert sorted(views.slots.tolist()) == (views.ids.flatten() == mask_id).nonzero()[:, 0].tolist()


def test_mask_ratio_is_uniform_and_weights_are_its_inverse(policy: Transformer, rollouts: RolloutBatch) -> None:
    many = replace(_labels(rollouts).select(torch.zeros(3000, dtype=torch.long)), sample_keys=torch.arange(3000))
    views, weights = plan_sft(many, policy.config, step=0, seed=0)
    # E[1/t * masked] = 1: the weighted number of masked slots is the number of slots.
    assert abs(weights.sum().item() / (3000 * 8) - 1) < 0.03
    assert weights.min() >= 1
    assert abs(len(views.targets) / (3000 * 8) - 0.5) < 0.02


def test_loss_is_that_of_a_row_by_row_loop(policy: Transformer, rollouts: RolloutBatch) -> None:
    config = SftConfig(num_labels=12, num_steps=1, batch_size=6, num_warmup_steps=0)
    labels = _labels(rollouts)
    expected = 0.0
    for place, row in enumerate(sft_rows(12, 6, 0, seed=3).tolist()):
        one = replace(labels.select(slice(row, row + 1)), sample_keys=torch.tensor([place]))
        views, weights = plan_sft(one, policy.config, step=0, seed=3)
        with torch.no_grad():
            logp = policy(views.ids[:, : int(views.lengths[0])]).log_softmax(-1).flatten(0, 1)
        expected -= (logp[views.slots][views.scored, views.targets] * weights).sum().item() / (6 * 8)
    metrics = SftLearner(ShardedPolicy(policy, None), config, labels, seed=3).step(0, lr=0.0)
    assert abs(metrics["loss"] - expected) < 1e-5


def test_sft_learns_its_labels(policy: Transformer, rollouts: RolloutBatch) -> None:
    config = SftConfig(num_labels=12, num_steps=120, batch_size=12, lr=1e-2)
    learner = SftLearner(ShardedPolicy(policy, None), config, _labels(rollouts), seed=0)
    losses = [learner.step(step, config.lr_at(step, step / 120))["loss"] for step in range(120)]
    assert sum(losses[-10:]) < 0.2 * sum(losses[:10])
