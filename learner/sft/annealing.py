"""Attention annealing: an autoregressive policy sees a few more of the later slots at each optimizer step.

Attention begins causal but for a share of the later slots, and the share grows linearly until a slot sees all that the
policy's own attention shows it: the whole canvas, or the rest of its block. The draw is one of an optimizer step,
shared by its documents and by all layers (DiffuLLaMA, arXiv 2410.17891, and its `get_anneal_attn_mask`).

Shape letters: S slots of the widest document.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from learner.counter import uniform
from learner.keys import fold
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

_OPENED_KEY = 4


def opened_slots(step: int, num_steps: int, width: int, seed: int) -> Tensor | None:
    """[S, S] bool: whether the slot at one place sees what stands at another; None once it sees everything.

    Keyed by the step and the two places alone: neither a resumed stage nor micro-batches change it.

    Args:
        step: the optimizer step, from 0.
        num_steps: optimizer steps until attention is open; the share of later slots that are seen is (step + 1) /
            num_steps.
        width: S.
        seed: the run's.
    """
    if step + 1 >= num_steps:
        return None
    places_S = torch.arange(width)
    drawn_SS = uniform(torch.tensor(fold(seed, step, _OPENED_KEY)), places_S[:, None], places_S)
    return (places_S <= places_S[:, None]) | (drawn_SS < (step + 1) / num_steps)
