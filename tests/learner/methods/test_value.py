"""The value model: step-level targets, its clipped loss, what it changes in a round, and what it refuses.

The numbers of the first two tests are those of the authors' own code, github.com/Gen-Verse/dLLM-RL at 10b4fd1
(`compute_returns_and_advantages_from_fragments` and `forward_process` of train/train_sdar_value.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from learner.batch import GroupedBatch, RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import InnerUpdate, SamplerFacts
from learner.learner import Learner
from learner.model.lora_config import LoraConfig
from learner.model.networks import make_model
from learner.model.transformer import Transformer
from learner.optimizer import StepResult
from learner.parallel.sharded_tensors import gather_on_rank_0
from learner.parallel.sharding import ShardedPolicy
from learner.round import Round
from learner.value.advantages import outcome_rewards, step_targets
from learner.value.model import clipped_value_loss
from tests.learner.methods.test_algorithms import moved, moved_value_network, values_of

SAMPLER = SamplerFacts(block_length=4)
STEPS = torch.tensor([[2, 0, 1, 2, 0, 3, -1, -1], [0, 0, 1, 1, 4, 4, 2, 2]])
VALUES = torch.tensor(
    [[0.1, 0.2, 0.3, 0.4, -0.5, 0.6, 7.0, 7.0], [-0.1, 0.25, 0.35, 0.5, 0.7, -0.3, 0.05, 0.15]],
)
REWARDS = torch.tensor([1.0, -0.5])
PROCESS_REWARDS = torch.tensor([[0.5, -0.2, 0.1, 0, 0.3, 1.0, 7.0, 7.0], [0, 0.2, 0.4, -0.6, 0.8, 1.0, 0.1, -0.1]])
# By gamma and lambda: advantages and returns of their code. The last one is for rewards of single tokens.
PUBLISHED = {
    (1.0, 1.0): (
        [[0.9, 0.8, 0.7, 0.6, 1.5, 0.4, 0, 0], [-0.4, -0.75, -0.85, -1.0, -1.2, -0.2, -0.55, -0.65]],
        [[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0, 0], [-0.5] * 8],
    ),
    (0.9, 0.8): (
        [
            [0.728, 0.315635, 0.34116, 0.428, 1.015635, 0.4, 0, 0],
            [0.021498, -0.328502, -0.56528, -0.71528, -1.2, -0.2, -0.374, -0.474],
        ],
        [[0.9, 0.729, 0.81, 0.9, 0.729, 1.0, 0, 0], [-0.3645, -0.3645, -0.405, -0.405, -0.5, -0.5, -0.45, -0.45]],
    ),
    (0.99, 0.95): (
        [
            [1.3702, 0.799855, 0.959973, 0.5702, 1.999855, 0.4, 0, 0],
            [0.789119, 0.639119, 0.860347, -0.289653, 0.1, 1.3, 0.90635, 0.60635],
        ],
        [
            [1.49, 1.114324, 1.3276, 0.99, 1.614324, 1.0, 0, 0],
            [0.774269, 0.974269, 1.28209, 0.28209, 0.8, 1.0, 0.991, 0.791],
        ],
    ),
}


@pytest.mark.parametrize(("gamma", "lam"), PUBLISHED)
def test_advantages_and_returns_equal_the_authors_code(gamma: float, lam: float) -> None:
    rewards_BL = PROCESS_REWARDS if gamma == 0.99 else outcome_rewards(REWARDS, STEPS)
    advantages, returns = PUBLISHED[gamma, lam]
    found = step_targets(VALUES, rewards_BL, STEPS, gamma=gamma, lam=lam)
    assert torch.allclose(found.advantages, torch.tensor(advantages), atol=2e-6)
    assert torch.allclose(found.returns, torch.tensor(returns), atol=2e-6)


def test_the_clipped_loss_equals_the_authors_code() -> None:
    values = torch.tensor([0.5, -0.4, 0.9], requires_grad=True)
    loss_N = clipped_value_loss(values, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, -0.5, 0.35]), clip=0.2)
    # Theirs is the sum over the slots of a canvas, divided by their number, here 4.
    (loss_N.sum() / 4).backward()
    assert float(loss_N.detach().sum() / 4) == pytest.approx(0.1303125, abs=1e-6)
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0, 0, 0.1375])


def _config(**changes: object) -> LearnerConfig:
    settings: dict[str, object] = {
        "algorithm": "tracerl-value",
        "num_rounds": 40,
        "num_minibatches": 2,
        "filters": {"min_accuracy": 0.0},
        "lr": 1e-3,
        "max_grad_norm": 1e9,
        "micro_batch_tokens": 70,
        "value": {"lr": 1e-2, "gamma": 0.9, "lam": 0.8},
    }
    return LearnerConfig.model_validate(settings | changes)


def _learner(policy: Transformer, config: LearnerConfig, lora: LoraConfig | None = None) -> Learner:
    return Learner(ShardedPolicy(policy, None, lora=lora or LoraConfig()), config, SAMPLER)


def _network(learner: Learner) -> ShardedPolicy:
    assert learner.value is not None
    return learner.value.network


class _Gradients:
    """A fake optimizer of the value model: records gradients, and moves the network by known noise."""

    def __init__(self, network: Transformer) -> None:
        self._network = network
        self.found: list[dict[str, Tensor]] = []

    def rollback(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, _lr: float, _max_grad_norm: float, loss: Tensor) -> StepResult:
        grads = {name: one.grad.clone() for name, one in self._network.named_parameters() if one.grad is not None}
        self.found.append(grads)
        moved(self._network).zero_grad()
        return StepResult(loss=loss.item(), grad_norm=0.0)


def test_its_gradient_equals_plain_loops_in_float64(
    policy: Transformer, rollouts: RolloutBatch, grouped: GroupedBatch
) -> None:
    """Over two minibatches: at the second, predictions differ from those of the round's start, and some are clipped."""
    config = _config(advantage="group_mean", value={"gamma": 0.9, "lam": 0.8, "clip": 0.02})
    masks = config.estimator.corrupt(grouped, InnerUpdate(0, 1), SAMPLER)
    first = moved_value_network(policy).double()
    second = moved(moved_value_network(policy)).double()
    old = values_of(first, grouped, masks)
    learner = _learner(policy, config)
    recorder = _Gradients(moved(_network(learner).module))
    assert learner.value is not None
    learner.value.optimizer = recorder  # type: ignore[assignment]
    learner.update(rollouts, 0)

    rewards = rollouts.rewards.double()
    num_clipped = 0
    for step, network in enumerate((first, second)):
        losses = []
        for row in range(6 * step, 6 * step + 6):
            group = row // 4 * 4
            later = float(rewards[row] - rewards[group : group + 4].mean())
            canvases = [(int(masks.parts[at]), at) for at in (masks.rows == row).nonzero()[:, 0].tolist()]  # type: ignore[index]
            for part, at in sorted(canvases, reverse=True):
                prompt = grouped.prompt_ids[row, : grouped.prompt_lengths[row]]
                canvas = grouped.completion_ids[row].masked_fill(masks.masked[at], policy.config.mask_token_id)
                values = network(torch.cat((prompt, canvas))[None])[0, len(prompt) :, 0]
                for slot in masks.scored[at].nonzero()[:, 0].tolist():
                    before = old[row][part][slot]
                    clipped = before + (values[slot] - before).clamp(-0.02, 0.02)
                    errors = (values[slot] - later) ** 2, (clipped - later) ** 2
                    num_clipped += int(errors[1] > errors[0])
                    losses.append(0.5 * torch.maximum(*errors))
                later *= 0.9
        torch.stack(losses).mean().backward()
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None
            scale = max(1e-3, float(parameter.grad.abs().max()))
            assert float((recorder.found[step][name] - parameter.grad).abs().max()) < 2e-4 * scale, name
    assert num_clipped > 0


def test_rewards_of_blocks_count_from_their_step_on(policy: Transformer, rollouts: RolloutBatch) -> None:
    """A head of zeros predicts 0: a token's advantage is the sum of what follows."""
    process = torch.zeros(12, 8)
    # The slots of the first block's last step, at most, and a reward of 2 for it.
    is_last = (rollouts.step_map == 1) & rollouts.completion_mask()
    process[is_last] = 2.0
    batch = replace(rollouts, process_rewards=process, outcome_rewards=rollouts.rewards - 2.0)
    learner = _learner(policy, _config(advantage="group_mean", num_minibatches=1, value={}))
    work = Round(learner.policy, learner.config, SAMPLER, batch)
    assert learner.value is not None
    (targets,), _ = learner.value.set_targets([work])
    outcome = rollouts.rewards - rollouts.rewards.view(3, 4).mean(dim=1).repeat_interleave(4)
    before_it = (rollouts.step_map <= 1) & is_last.any(dim=1, keepdim=True)
    expected = (outcome[:, None] + 2.0 * before_it).masked_fill(~rollouts.completion_mask(), 0.0)
    assert work.rows.slot_advantages is not None
    assert torch.allclose(work.rows.slot_advantages, expected, atol=1e-6)
    assert torch.allclose(targets.returns, expected, atol=1e-6)


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=2, alpha=4)], ids=["whole", "adapter"])
def test_it_learns_to_predict_returns(policy: Transformer, rollouts: RolloutBatch, lora: LoraConfig) -> None:
    # Rewards that the states tell: of completions that begin with a small token.
    batch = replace(rollouts, rewards=(rollouts.completion_ids[:, 0] < 19).float())
    learner = _learner(policy, _config(advantage="group_mean", lr=1e-6), lora)
    explained = [learner.update(batch, index)["value/explained_variance"] for index in range(25)]
    assert explained[0] <= 0.01, "the head begins at zero"
    assert explained[-1] > 0.5


def test_a_resumed_learner_continues_bit_identically(policy: Transformer, rollouts: RolloutBatch) -> None:
    first = _learner(policy, _config())
    first.update(rollouts, 0)
    copied = make_model(policy.config)
    copied.load_state_dict(policy.state_dict())
    state = gather_on_rank_0(0, first.state())
    second = _learner(copied, _config())
    second.load_full_state(state)
    metrics = first.update(rollouts, 1)
    assert second.update(rollouts, 1) == metrics
    assert all(torch.equal(mine, policy.state_dict()[name]) for name, mine in copied.state_dict().items())
    theirs = _network(first).weights
    assert all(torch.equal(mine, theirs[name]) for name, mine in _network(second).weights.items())


def test_a_round_that_fails_leaves_policy_and_value_model_unchanged(
    policy: Transformer, rollouts: RolloutBatch
) -> None:
    learner = _learner(policy, _config(num_minibatches=1))
    learner.update(rollouts, 0)
    before = {name: tensor.clone() for name, tensor in learner.state().items()}
    weights = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    assert learner.value is not None
    learner.value._config = learner.value._config.model_copy(update={"clip": float("nan")})
    with pytest.raises(FloatingPointError):
        learner.update(rollouts, 1)
    assert all(parameter.grad is None for parameter in _network(learner).trained_parameters.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.state().items())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in policy.state_dict().items())


def test_its_learning_rate_is_its_own_and_follows_the_schedule(policy: Transformer, rollouts: RolloutBatch) -> None:
    rates: list[float] = []

    def step(lr: float, _max_grad_norm: float, _loss: Tensor) -> StepResult:
        rates.append(lr)
        return StepResult(loss=0.0, grad_norm=0.0)

    for value in ({}, {"lr": 0.5}):
        learner = _learner(policy, _config(num_warmup_rounds=1, num_minibatches=1, value=value))
        assert learner.value is not None
        learner.value.optimizer.step = step  # type: ignore[method-assign]
        for index in range(2):
            learner.update(rollouts, index)
    assert rates == pytest.approx([2.5e-3, 5e-3, 0.25, 0.5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"estimator": {"name": "one_step"}}, "value needs estimator trajectory, which keeps the record of denoise"),
        ({"estimator": {"num_sampled": 2}}, "value needs all steps of a completion"),
        ({"objective": {"level": "sequence"}}, "a ratio of whole completions has a single advantage"),
        ({"advantage": "part_z"}, "value needs an advantage of the whole reward, such as group_z, not part_z"),
        ({"objective": {"name": "trajectory_balance"}, "advantage": "group_mean"}, "not trajectory_balance"),
    ],
)
def test_methods_without_step_records_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _config(**changes)


def test_token_editing_is_refused() -> None:
    assert "written several times" in str(_config().incompatibility(replace(SAMPLER, edits=True)))
