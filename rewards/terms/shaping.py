"""Reward terms computed from the sample alone: length penalty, and tokens per forward.

Truncated completions can also be excluded instead of penalized: `learner.filters.truncated`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from pydantic import PositiveInt

from rewards.sample import Sample
from rewards.terms.term import TermConfig, Value


class LengthPenaltyConfig(TermConfig):
    """A soft penalty for completions that nearly fill their canvas."""

    kind: Literal["length_penalty"] = "length_penalty"
    """Selects this term."""
    buffer_tokens: PositiveInt
    """Tokens before the end of the canvas over which the value falls from 0 to -1; at most
    `rollout.sampling.gen_length`."""


class SpeedConfig(TermConfig):
    """Tokens per forward: higher for completions that were denoised in fewer steps."""

    kind: Literal["speed"] = "speed"
    """Selects this term."""


def length_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """Return 0 up to `max_tokens - buffer_tokens`, then linearly down to -1 at `max_tokens`.

    DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), with the canvas as its L_max and the buffer as its
    L_cache. A completion cannot be longer than its canvas, so the equation's third case never applies.
    """
    excess = num_tokens - (max_tokens - buffer_tokens)
    return -excess / buffer_tokens if excess > 0 else 0.0


def speed(num_tokens: int, num_forwards: int) -> float:
    """Return tokens per forward, LightningRL's measure of parallelism (arXiv 2603.13319; its `reward/rl_reward.py`).

    Correct and incorrect completions earn it alike, here and in LightningRL. It is not bounded by 1. A small weight, or
    a reward that is normalized by parts (`learner.advantage: part_z`), keeps it from dominating the reward.
    """
    return num_tokens / num_forwards


class PerSample:
    """A term that is a function of one sample."""

    def __init__(self, value: Callable[[Sample], float]) -> None:
        self._value = value

    def values(self, samples: Sequence[Sample]) -> list[Value]:
        """Return the function's value of each sample."""
        return [self._value(sample) for sample in samples]

    def take_costs(self) -> Mapping[str, float]:
        """Return no costs."""
        return {}


def length_penalty_term(config: LengthPenaltyConfig) -> PerSample:
    """Return the term of a config."""
    return PerSample(lambda sample: length_penalty(sample.num_tokens, sample.max_tokens, config.buffer_tokens))


def speed_term() -> PerSample:
    """Return the term of tokens per forward."""
    return PerSample(lambda sample: speed(sample.num_tokens, sample.num_forwards))
