import math

import pytest
import torch

from learner.advantages import Advantage, group_advantages, zero_variance_share
from learner.objectives import ClippedRatioConfig, clipped_ratio

CONFIG = ClippedRatioConfig(clip_low=0.2, clip_high=0.3, kl_coef=0.5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "is_clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.2, 1.0, -1.2, False),
        (1.6, 1.0, -1.3, True),
        (0.5, 1.0, -0.5, False),
        (0.5, -1.0, 0.8, True),
        (1.6, -1.0, 1.6, False),
    ],
)
def test_surrogate_is_the_pessimistic_clip(ratio: float, advantage: float, loss: float, is_clipped: bool) -> None:
    terms = clipped_ratio(CONFIG, torch.tensor([math.log(ratio)]), torch.tensor([0.0]), None, torch.tensor([advantage]))
    assert terms.loss.item() == pytest.approx(loss, abs=1e-6)
    assert terms.is_clipped.item() is is_clipped
    assert terms.kl.item() == 0


def test_gradient_at_ratio_one_is_minus_the_advantage() -> None:
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.7, -0.3])
    clipped_ratio(CONFIG, new, new.detach(), None, advantages).loss.sum().backward()
    torch.testing.assert_close(new.grad, -advantages)


def test_kl_is_the_k3_estimate_and_its_gradient_pulls_to_the_reference() -> None:
    new = torch.tensor([-1.0], requires_grad=True)
    terms = clipped_ratio(CONFIG, new, new.detach(), torch.tensor([-2.0]), torch.tensor([0.0]))
    k3 = math.exp(-1.0) + 1.0 - 1.0
    assert terms.kl.item() == pytest.approx(k3)
    assert terms.loss.item() == pytest.approx(0.5 * k3)
    terms.loss.sum().backward()
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(0.5 * (1 - math.exp(-1.0)))


def test_gradient_is_that_of_finite_differences() -> None:
    torch.manual_seed(0)
    new, old, reference = (torch.randn(6, dtype=torch.float64) * 0.1 for _ in range(3))
    advantages = torch.randn(6, dtype=torch.float64)
    new.requires_grad_(True)

    def loss(values: torch.Tensor) -> torch.Tensor:
        return clipped_ratio(CONFIG, values, old, reference, advantages).loss.sum()

    assert torch.autograd.gradcheck(loss, new)


def test_advantages_are_within_the_group() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 5.0, 7.0]), torch.tensor([3, 3, 8, 8])
    assert group_advantages(rewards, groups, Advantage.GROUP_MEAN).tolist() == [0.5, -0.5, -1.0, 1.0]
    z = group_advantages(rewards, groups, Advantage.GROUP_Z)
    torch.testing.assert_close(z, torch.tensor([1.0, -1.0, -1.0, 1.0]), atol=1e-3, rtol=0)
    round_z = group_advantages(rewards, groups, Advantage.ROUND_Z)
    torch.testing.assert_close(round_z, torch.tensor([0.5, -0.5, -1.0, 1.0]) / 0.625**0.5, atol=1e-3, rtol=0)


def test_a_group_of_equal_rewards_has_no_advantage() -> None:
    rewards, groups = torch.tensor([0.1, 0.1, 0.1, 5.0, 7.0, 0.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    for advantage in Advantage:
        assert group_advantages(rewards, groups, advantage)[:3].abs().max() < 1e-4
    assert zero_variance_share(rewards, groups) == 0.5
