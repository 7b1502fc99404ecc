"""Randomness of the renoising sampler: counter-based uniforms, or a record that is replayed.

Shape letters: C slots of the canvas, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from learner.counter import uniform
from learner.seeds import fold
from rollout.token_sampling import Predictions, inverse_cdf

_INITIAL_KEY, _TOKEN_KEY, _FRESH_KEY = 31, 32, 33


class RandomSource(Protocol):
    """The random choices of one completion."""

    def initial(self, canvas: int) -> Tensor:
        """Return [C] random ids, with which a canvas begins."""

    def tokens(self, canvas: int, step: int, predicted: Predictions) -> Tensor:
        """Sample [C] tokens, one for each slot, from the predictions."""

    def fresh(self, canvas: int, step: int) -> Tensor:
        """Return [C] random ids for the slots that a step does not accept."""


class KeyedRandomSource:
    """Counter-based generator: the same seed and weights give the same tokens, whatever else is running."""

    def __init__(self, seed: int, num_slots: int, vocab_size: int, device: torch.device) -> None:
        """Make the generator for canvases of `num_slots` slots."""
        self._key = torch.tensor(fold(seed, _INITIAL_KEY), device=device)
        self._slots, self._vocab_size = torch.arange(num_slots, device=device), vocab_size

    def initial(self, canvas: int) -> Tensor:
        """As `RandomSource`."""
        return self._ids(_INITIAL_KEY, canvas, 0)

    def tokens(self, canvas: int, step: int, predicted: Predictions) -> Tensor:
        """As `RandomSource`."""
        uniforms_C = uniform(self._key, _TOKEN_KEY, canvas, step, self._slots)
        return inverse_cdf(predicted.shifted.exp(), uniforms_C)[0]

    def fresh(self, canvas: int, step: int) -> Tensor:
        """As `RandomSource`."""
        return self._ids(_FRESH_KEY, canvas, step)

    def _ids(self, kind: int, canvas: int, step: int) -> Tensor:
        place_C = uniform(self._key, kind, canvas, step, self._slots).double()
        return (place_C * self._vocab_size).long().clamp(max=self._vocab_size - 1)
