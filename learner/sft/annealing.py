"""Attention annealing: causal attention opens to bidirectional attention over optimizer steps.

Attention begins causal except for a random share of the later slots. The share grows linearly until a slot sees all
that the policy's own attention allows: the whole canvas, or the rest of its block. One mask is drawn per optimizer
step, and shared by its documents and all layers (DiffuLLaMA, arXiv 2410.17891, and its `get_anneal_attn_mask`).

Shape letters: S slots of the widest document.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from learner.counter import uniform
from learner.model.deferred import torch
from learner.seeds import fold

if TYPE_CHECKING:
    from torch import Tensor

_ANNEALING_KEY = 4


def annealing_mask(step: int, num_steps: int, width: int, seed: int) -> Tensor | None:
    """Draw the attention mask of a step, [S, S] bool: query by key; None once attention is open.

    It is keyed only by the step and the two slots, so that neither resuming nor micro-batches change it.

    Args:
        step: the optimizer step, from 0.
        num_steps: optimizer steps until attention is open; the visible share of later slots is (step + 1) / num_steps.
        width: S.
        seed: the run's.
    """
    if step + 1 >= num_steps:
        return None
    places_S = torch.arange(width)
    drawn_SS = uniform(torch.tensor(fold(seed, step, _ANNEALING_KEY)), places_S[:, None], places_S)
    return (places_S <= places_S[:, None]) | (drawn_SS < (step + 1) / num_steps)
