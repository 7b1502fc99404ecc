"""Losses and gradients against those of the authors' own code for the same completions.

Their loss functions were run in float64 on a policy given by a formula. The log-probability of a completion's token is
`_logp` of its row, its slot, the number of masked slots of its canvas, and one parameter. This file has only their
results. Sources: github.com/Gen-Verse/dLLM-RL at 10b4fd1 (`prepare_inputs_and_labels_for_text` and `forward_process` of
train/rl_llada.py, `z_score_normalize` of reward/rl_reward.py, the options of configs/rl_llada.yaml but for `shrink`)
and github.com/probablyabot/agrpo at 98f1182 (`compute_loss` of agrpo_trainer.py, the options of train.yaml but for
sizes).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import learner.learner
import learner.round
from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import SamplerFacts, Views
from learner.learner import Learner
from learner.model.transformer import Transformer
from learner.optimizer import StepResult
from learner.parallel.sharding import ShardedPolicy
from tests.learner.batches import batch_of

# Two blocks of 4 slots, two slots a step. 39 ends a text, and 37 may follow it.
END, MASK = 39, 38
COMPLETIONS = [
    [3, 9, 14, 2, 21, 30, 39, 37],
    [5, 5, 8, 1, 39, 37, 37, 37],
    [12, 4, 33, 6, 7, 8, 9, 10],
    [1, 2, 3, 39, 37, 37, 37, 37],
    [11, 12, 13, 14, 15, 39, 37, 37],
    [20, 19, 18, 17, 16, 15, 14, 39],
    [6, 6, 6, 6, 39, 37, 37, 37],
    [2, 4, 6, 8, 10, 12, 14, 16],
]
STEPS = [
    [0, 1, 0, 1, 2, 2, 3, 3],
    [1, 0, 0, 1, 3, 2, 2, 3],
    [0, 0, 1, 1, 3, 2, 3, 2],
    [1, 1, 0, 0, 2, 3, 3, 2],
    [0, 1, 1, 0, 2, 3, 2, 3],
    [1, 0, 1, 0, 3, 3, 2, 2],
    [0, 0, 1, 1, 2, 2, 3, 3],
    [1, 1, 0, 0, 2, 3, 2, 3],
]
PROMPT = 2


def _logp(row: Tensor, slot: Tensor, num_masked: Tensor, parameter: Tensor) -> Tensor:
    certainty = 0.4 + 0.3 * (slot % 4) + 0.07 * row + 0.05 * num_masked
    return parameter * torch.sin(1.0 + slot + 2.0 * row) - certainty


@dataclass
class _Formula:
    """A fake of `token_logps`: the formula at a parameter of the policy, shifted by `moved`."""

    moved: float = 0.0

    def __call__(self, module: Transformer, views: Views, *_distribution: object) -> Tensor:
        at_V, width = module.head.weight[0, 0], views.ids.shape[1]
        slots_N = views.slots[views.scored]
        view_N, slot_N = slots_N // width, slots_N % width - PROMPT
        masked_N = (views.ids[:, PROMPT:] == MASK).sum(dim=1)[view_N]
        # The first token of a prompt identifies the row.
        return _logp(views.ids[view_N, 0], slot_N, masked_N, at_V + self.moved)


class _Steps:
    """A fake optimizer: records the derivative by the parameter, and shifts the formula by a known amount."""

    def __init__(self, model: Transformer, formula: _Formula, by: float) -> None:
        self._model, self._formula, self._by = model, formula, by
        self.gradients: list[float] = []

    def rollback(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, lr: float, max_grad_norm: float, loss: Tensor) -> StepResult:
        gradient = self._model.head.weight.grad
        assert gradient is not None
        self.gradients.append(float(gradient[0, 0]))
        self._model.zero_grad()
        self._formula.moved += self._by
        return StepResult(loss=0.0, grad_norm=0.0)


def _batch(completions: list[list[int]], rewards: Tensor, correct: Tensor, entropy: Tensor) -> RolloutBatch:
    ids, steps = torch.tensor(completions), torch.tensor(STEPS[: len(completions)])
    rows = len(completions)
    is_end = ids == END
    lengths = torch.where(is_end.any(dim=1), is_end.int().argmax(dim=1) + 1, 8)
    num_masked = (steps[:, None, :] >= steps[:, :, None]).sum(dim=2)
    recorded = _logp(torch.arange(rows)[:, None], torch.arange(8), num_masked, torch.tensor(0.0))
    return batch_of(
        prompts=torch.tensor([[row, 7] for row in range(rows)]),
        completions=ids,
        lengths=lengths,
        steps=steps,
        rewards=rewards,
        correct=correct,
        truncated=~is_end.any(dim=1),
        is_stop=is_end,
        commit_logp=recorded,
        commit_law_entropy=entropy,
    )


def _learned(
    policy: Transformer,
    settings: dict[str, object],
    batch: RolloutBatch,
    formula: _Formula,
    by: float,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[float, list[float]]:
    """Return the mean loss of the steps, and the derivative of each."""
    with torch.no_grad():
        policy.head.weight[0, 0] = 0.0
    for module in (learner.learner, learner.round):
        monkeypatch.setattr(module, "token_logps", formula)
    for probe in ("sampling_gap", "mask_variance"):
        monkeypatch.setattr(learner.learner, probe, lambda *_: {})
    config = LearnerConfig.model_validate({"num_rounds": 1, **settings})
    trained = Learner(ShardedPolicy(policy, None), config, SamplerFacts(temperature=0.7, block_length=4))
    steps = _Steps(policy, formula, by)
    trained.optimizer = steps  # type: ignore[assignment]
    return trained.update(batch, 0)["loss"], steps.gradients


def test_tracerl_equals_the_authors_code(policy: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of a sweep, each on the segments of four completions. The rewards are not used. Our z-score adds 1e-4
    to the standard deviation."""
    correct = torch.tensor([True, False, False, True, False, True, True, True])
    batch = _batch(COMPLETIONS, torch.linspace(0, 1, 8), correct, torch.zeros(8, 8))
    settings = {"algorithm": "tracerl", "num_minibatches": 2, "estimator": {"steps_per_segment": 2}}
    loss, gradients = _learned(policy, settings, batch, _Formula(), 0.35, monkeypatch)
    assert loss == pytest.approx((0.142857143 + 0.062964239) / 2, abs=3e-5)
    assert gradients == pytest.approx([-0.084318826, 0.297514194], abs=1e-4)


def test_agrpo_equals_the_authors_code(policy: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy has moved since it sampled. Their code received our draws, and 0.005 more entropy per token, since our
    minimum entropy of a step is 0.01."""
    rewards = torch.tensor([0.9, 0.1, 0.3, 0.5])
    entropy = 0.1 * ((3 * torch.arange(4)[:, None] + 5 * torch.arange(8)) % 7).float()
    completions = [[END if token == 37 else token for token in row] for row in COMPLETIONS[:4]]
    batch = _batch(completions, rewards, rewards > 0.4, entropy)
    settings = {"algorithm": "agrpo", "estimator": {"num_sampled": 3}}
    loss, gradients = _learned(policy, settings, batch, _Formula(moved=0.25), 0.0, monkeypatch)
    assert loss == pytest.approx(0.042293560, rel=1e-4)
    assert gradients == pytest.approx([0.043786329], rel=1e-4)
