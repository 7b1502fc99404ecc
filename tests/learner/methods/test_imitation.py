"""Denoising loss of correct completions (imitation), against plain loops."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import InnerUpdate, RandomMasksConfig, SamplerFacts
from learner.learner import Learner
from learner.model.transformer import Transformer
from learner.optimizer import StepResult
from learner.parallel.sharding import ShardedPolicy

COEFFICIENT = 0.3


def _gradients(
    policy: Transformer, batch: RolloutBatch, coefficient: float, **changes: object
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the gradients and metrics of one update whose step changes nothing."""
    settings = {"num_rounds": 1, "inner_updates": 1, "objective": {"kl_coef": 0.0}, "imitation_coef": coefficient}
    model = copy.deepcopy(policy)
    learner = Learner(ShardedPolicy(model, None), LearnerConfig.model_validate(settings | changes))
    kept: dict[str, Tensor] = {}

    def step(lr: float, max_grad_norm: float, loss: Tensor) -> StepResult:
        kept.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        return StepResult(loss=0.0, grad_norm=0.0)

    learner.optimizer.step = step  # type: ignore[method-assign]
    return kept, learner.update(batch, 0)


def _some_correct(rollouts: RolloutBatch) -> RolloutBatch:
    return replace(rollouts, correct=torch.arange(rollouts.num_rows) % 3 == 1)


def _by_hand(policy: Transformer, batch: RolloutBatch) -> tuple[dict[str, Tensor], float]:
    """Return gradient and value of the mean cross-entropy of a masked token, one canvas at a time, in float64."""
    model = copy.deepcopy(policy).to(torch.float64)
    correct = GroupedBatch.of(batch.select(batch.correct))
    masks = RandomMasksConfig(min_ratio=0.0, max_ratio=1.0, ratios="spread", coupled=False)
    corruption = masks.corrupt(correct, InnerUpdate(0, 1), SamplerFacts())
    losses = []
    for row in range(correct.num_rows):
        slots = corruption.scored[row].nonzero()[:, 0]
        prompt = correct.prompt_ids[row, : correct.prompt_lengths[row]]
        completion = torch.where(corruption.masked[row], model.config.mask_token_id, correct.completion_ids[row])
        logits = model(torch.cat((prompt, completion))[None])[0, len(prompt) :]
        losses.append(-logits.log_softmax(-1)[slots, correct.completion_ids[row, slots]])
    loss = torch.cat(losses).mean()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, loss.item()


@pytest.mark.parametrize("max_tokens", [14, 10_000])
def test_imitation_adds_the_gradient_of_the_mean_cross_entropy(
    policy: Transformer, rollouts: RolloutBatch, max_tokens: int
) -> None:
    batch = _some_correct(rollouts)
    without, plain = _gradients(policy, batch, 0.0)
    with_it, metrics = _gradients(policy, batch, COEFFICIENT, micro_batch_tokens=max_tokens)
    expected, loss = _by_hand(policy, batch)
    assert "imitation_loss" not in plain
    assert metrics["imitation_loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["loss"] == pytest.approx(plain["loss"] + COEFFICIENT * loss, rel=1e-5)
    for name, gradient in expected.items():
        added = (with_it[name] - without[name]).to(torch.float64)
        assert float((added - COEFFICIENT * gradient).abs().max()) < 2e-4 * float(gradient.abs().max()), name


def test_without_a_correct_completion_there_is_no_imitation(policy: Transformer, rollouts: RolloutBatch) -> None:
    batch = replace(rollouts, correct=torch.zeros(rollouts.num_rows, dtype=torch.bool))
    without, plain = _gradients(policy, batch, 0.0)
    with_it, metrics = _gradients(policy, batch, COEFFICIENT)
    assert metrics == plain
    assert all(torch.equal(with_it[name], gradient) for name, gradient in without.items())
