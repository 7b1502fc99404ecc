"""Counter-based random numbers: a draw is a pure function of its keys.

Masks and samples are keyed by their purpose (run seed, sample, denoise step, slot, ...), never by the number of earlier
draws. So a draw does not depend on the worker, the batch neighbours or the attempt. Old, new and reference likelihoods
share masks without storing them.

The hash is splitmix64's finaliser (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014)
applied once for each key. Integer overflow wraps the same way on CPU and GPU, so draws are bit-identical on both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from learner.model.deferred import torch
from learner.seeds import GAMMA, MASK_64, MIX_1, MIX_2

if TYPE_CHECKING:
    from torch import Tensor


def uniform(seeds: Tensor, *keys: Tensor | int) -> Tensor:
    """Draw uniformly from (0, 1), float32, of the broadcast shape of `seeds` [...] and `keys` [...], all int64.

    The draw is the top 23 bits of `fold(seed, *keys)` plus a half: exact in float32, never 0 or 1.
    """
    return ((fold_tensor(seeds, *keys) >> 40).to(torch.float32) + 0.5) * 2.0**-23


def fold_tensor(seeds: Tensor, *keys: Tensor | int) -> Tensor:
    """Compute `fold(seed, *keys)`, int64, of the broadcast shape of `seeds` [...] and `keys` [...], all int64."""
    state = seeds
    for key in keys:
        state = _finalise_tensor((state ^ key) + _signed(GAMMA)) >> 1 & _signed(MASK_64 >> 1)
    return state


def _finalise_tensor(state: Tensor) -> Tensor:
    state = (state ^ _logical_shift(state, 30)) * _signed(MIX_1)
    state = (state ^ _logical_shift(state, 27)) * _signed(MIX_2)
    return state ^ _logical_shift(state, 31)


def _logical_shift(state: Tensor, bits: int) -> Tensor:
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
