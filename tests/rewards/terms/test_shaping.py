"""Tests of the shaping terms for completion length and number of forwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rewards import Sample
from rewards.terms.registry import make_term
from rewards.terms.shaping import LengthPenaltyConfig, SpeedConfig, length_penalty, speed


@pytest.mark.parametrize(
    ("num_tokens", "value"),
    # DAPO, eq. 13, with L_max = 20 and L_cache = 8.
    [(1, 0.0), (12, 0.0), (13, -1 / 8), (16, -0.5), (19, -7 / 8), (20, -1.0)],
)
def test_the_length_penalty_falls_from_0_to_minus_1_over_the_buffer(num_tokens: int, value: float) -> None:
    assert length_penalty(num_tokens, max_tokens=20, buffer_tokens=8) == value


def test_the_length_penalty_uses_each_samples_canvas_length(sample: Callable[..., Sample]) -> None:
    term = make_term(LengthPenaltyConfig(buffer_tokens=4))
    assert term.values([sample(num_tokens=6, max_tokens=8), sample(num_tokens=6, max_tokens=16)]) == [-0.5, 0.0]


def test_speed_is_tokens_per_forward(sample: Callable[..., Sample]) -> None:
    assert speed(12, 8) == 1.5
    assert make_term(SpeedConfig()).values([sample(num_tokens=8, num_forwards=2), sample(num_tokens=1)]) == [4.0, 1 / 3]
