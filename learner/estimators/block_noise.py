"""Per-block random masks for EBPO's block-wise ELBO (LLaDA2.1, arXiv 2602.08676, equations 4 and 5).

A block-causal policy scores all blocks of a canvas at once, each conditioned on the clean blocks before it. So one
canvas masks some slots of every block. The sum over blocks of size / masked times the masked tokens' log-probabilities
is, in expectation over the number of masked slots, a lower bound of the completion's log-likelihood. The noise levels
of a canvas are close together, and those of a block are evenly spread over its canvases.

Shape letters: B rows, L completion slots, R canvases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockNoise:
    """Masks, and the weights of the log-probabilities under them."""

    masked: Tensor
    """[R, L] bool."""
    weights: Tensor
    """[R, L] float32: covered slots of the block, divided by its masked slots."""


def block_noise(
    covered_RL: Tensor, block_RL: Tensor, noise_RL: Tensor, draws: tuple[Tensor, int], start_R: Tensor
) -> BlockNoise:
    """Mask at least one slot of every block that has a covered slot.

    Args:
        covered_RL: bool, the slots that may be masked.
        block_RL: the block of each slot, 0, 1, ..., ascending.
        noise_RL: in [0, 1), distinct for each slot; the smallest of a block are masked.
        draws: [R] the number of each canvas within its row, and the number of canvases per row.
        start_R: in [0, 1), the offset of each row's noise levels.
    """
    numbers_R, num_draws = draws
    size_RL = _of_block(covered_RL.long(), block_RL)
    num_blocks_R1 = block_RL.where(covered_RL, -1).amax(dim=1, keepdim=True) + 1
    cell_RL = numbers_R[:, None] * num_blocks_R1 + block_RL
    level_RL = (start_R[:, None] + cell_RL / (num_draws * num_blocks_R1).clamp(min=1)) % 1
    count_RL = torch.minimum((level_RL * size_RL).floor().long() + 1, size_RL)
    # In float64, adding the block's number does not round the noise away. Uncovered slots sort last in their block.
    order_RL = (2.0 * block_RL + noise_RL.double().masked_fill(~covered_RL, 1.0)).argsort(dim=1, stable=True)
    rank_RL = order_RL.argsort(dim=1) - _first_of_block(block_RL)
    return BlockNoise(masked=covered_RL & (rank_RL < count_RL), weights=size_RL / count_RL.clamp(min=1))


def _of_block(values_RL: Tensor, block_RL: Tensor) -> Tensor:
    """Sum the values over each slot's block, [R, L]."""
    return torch.zeros_like(values_RL).scatter_add_(1, block_RL, values_RL).gather(1, block_RL)


def _first_of_block(block_RL: Tensor) -> Tensor:
    """Return the first slot of each slot's block, [R, L]."""
    slots_L = torch.arange(block_RL.shape[1], device=block_RL.device)
    is_new_RL = torch.ones_like(block_RL, dtype=torch.bool)
    is_new_RL[:, 1:] = block_RL[:, 1:] != block_RL[:, :-1]
    return torch.where(is_new_RL, slots_L, 0).cummax(dim=1).values
