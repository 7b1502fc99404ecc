"""Micro-batches of about equally many tokens, and how their gradients add up to the whole batch's.

What must be seen together to have a loss (the terms of a token, of a row, of a group: an objective's unit) is kept in
one micro-batch where it fits. Where it does not, the update takes two sweeps: one without gradients for the
log-probabilities of all terms, from which the derivative of the loss by each follows; then one with gradients, each
term weighted by its derivative. Either way the gradient is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.estimators.terms import Terms


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatches:
    """A rank's views in micro-batches."""

    terms: tuple[Terms, ...]
    """In the order of the terms that they were made from."""
    is_split: bool
    """Whether a unit is spread over several of them."""


def cut(terms: Terms, unit_N: Tensor, max_tokens: int, *, spares_padding: bool = False) -> MicroBatches:
    """Cut the views into runs of at most `max_tokens` tokens; one that is longer stands alone.

    Args:
        terms: in the order of their views.
        unit_N: [N] int64: terms of equal value should stay together.
        max_tokens: of a micro-batch, with the padding that it has.
        spares_padding: whether the views of a micro-batch go back to back, and so have none.
    """
    terms = replace(terms, views=replace(terms.views, spares_padding=spares_padding))
    num_views, width = terms.views.ids.shape
    view_N = terms.views.slots[terms.views.scored] // width
    is_seam = _seams(view_N, unit_N, num_views).tolist()
    parts, is_split = runs(terms.views.lengths.tolist(), max_tokens, is_seam, spares_padding=spares_padding)
    return MicroBatches(terms=tuple(terms.of_views(part.start, part.stop) for part in parts), is_split=is_split)


def runs(
    lengths: list[int], max_tokens: int, is_seam: list[bool] | None = None, *, spares_padding: bool = False
) -> tuple[list[slice], bool]:
    """Cut rows into runs of at most `max_tokens` tokens, and say whether one ends elsewhere than at a seam.

    Args:
        lengths: tokens of each row.
        max_tokens: as for `cut`.
        is_seam: before which rows, and whether after the last, a run had better end; None: before any.
        spares_padding: as for `cut`.
    """
    seams = [True] * (len(lengths) + 1) if is_seam is None else is_seam
    parts: list[slice] = []
    is_split, begin = False, 0
    while begin < len(lengths):
        end, is_whole = _end_of(begin, lengths, seams, max_tokens, spares_padding=spares_padding)
        is_split |= not is_whole
        parts.append(slice(begin, end))
        begin = end
    return parts, is_split


def _seams(view_N: Tensor, unit_N: Tensor, num_views: int) -> Tensor:
    """[num_views + 1] bool: before which views no unit is cut."""
    _, unit_N = unit_N.unique(return_inverse=True)
    count = int(unit_N.max()) + 1
    first_U = view_N.new_full((count,), num_views).scatter_reduce_(0, unit_N, view_N, "amin")
    last_U = view_N.new_zeros(count).scatter_reduce_(0, unit_N, view_N, "amax")
    # A unit over views 2 to 5 forbids the seams before 3, 4 and 5.
    steps = view_N.new_zeros(num_views + 2)
    steps.index_add_(0, first_U + 1, torch.ones_like(first_U)).index_add_(0, last_U + 1, -torch.ones_like(last_U))
    return steps.cumsum(0)[: num_views + 1] == 0


def _end_of(
    begin: int, lengths: list[int], is_seam: list[bool], max_tokens: int, *, spares_padding: bool
) -> tuple[int, bool]:
    """Where a micro-batch that begins at a view ends, and whether it cuts no unit."""
    longest, total, furthest, furthest_seam = 0, 0, begin + 1, begin
    for end in range(begin + 1, len(lengths) + 1):
        longest, total = max(longest, lengths[end - 1]), total + lengths[end - 1]
        tokens = total if spares_padding else longest * (end - begin)
        if end > begin + 1 and tokens > max_tokens:
            break
        furthest = end
        if is_seam[end]:
            furthest_seam = end
    if furthest_seam > begin:
        return furthest_seam, True
    return furthest, False


def coefficients(loss: Callable[[Tensor], Tensor], logps_N: Tensor) -> Tensor:
    """The derivative [N] of a loss by each log-probability: what the second sweep weighs the terms with."""
    leaf_N = logps_N.detach().requires_grad_()
    (gradient_N,) = torch.autograd.grad(loss(leaf_N), leaf_N, allow_unused=True)
    return torch.zeros_like(logps_N) if gradient_N is None else gradient_N
