"""Micro-batches with a token limit, and exact gradient accumulation over them.

Terms that a loss needs together (those of a token, row or group: an objective's unit) are kept in one micro-batch if
they fit. Otherwise the update takes two sweeps. The first, without gradients, computes the log-probabilities of all
terms, and from them the derivative of the loss by each. The second, with gradients, weights each term by its
derivative. Either way the gradient is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.estimators.terms import Terms


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatches:
    """A rank's views, in micro-batches."""

    terms: tuple[Terms, ...]
    """In the order of the terms that they were made from."""
    is_split: bool
    """Whether a unit spans several of them."""


def make_micro_batches(
    terms: Terms, unit_N: Tensor, max_tokens: int, *, concatenates_rows: bool = False
) -> MicroBatches:
    """Cut the views into runs of at most `max_tokens` tokens; a longer view is a run by itself.

    Args:
        terms: in the order of their views.
        unit_N: [N] int64: terms of equal value should stay together.
        max_tokens: maximum tokens of a micro-batch, padding included.
        concatenates_rows: whether the views of a micro-batch are concatenated without padding.
    """
    terms = replace(terms, views=replace(terms.views, concatenates_rows=concatenates_rows))
    num_views, width = terms.views.ids.shape
    view_N = terms.views.slots[terms.views.scored] // width
    is_preferred_cut = _preferred_cuts(view_N, unit_N, num_views).tolist()
    parts, is_split = cut_rows(
        terms.views.lengths.tolist(), max_tokens, is_preferred_cut, concatenates_rows=concatenates_rows
    )
    return MicroBatches(terms=tuple(terms.of_views(part.start, part.stop) for part in parts), is_split=is_split)


def cut_rows(
    lengths: list[int], max_tokens: int, is_preferred_cut: list[bool] | None = None, *, concatenates_rows: bool = False
) -> tuple[list[slice], bool]:
    """Cut rows into runs of at most `max_tokens` tokens, and return whether any ends elsewhere than at a preferred cut.

    Args:
        lengths: tokens of each row.
        max_tokens: as for `make_micro_batches`.
        is_preferred_cut: [rows + 1] whether a run should end before each row, and after the last; None: anywhere.
        concatenates_rows: as for `make_micro_batches`.
    """
    preferred_cuts = [True] * (len(lengths) + 1) if is_preferred_cut is None else is_preferred_cut
    parts: list[slice] = []
    is_split, begin = False, 0
    while begin < len(lengths):
        end, is_whole = _end_of(begin, lengths, preferred_cuts, max_tokens, concatenates_rows=concatenates_rows)
        is_split |= not is_whole
        parts.append(slice(begin, end))
        begin = end
    return parts, is_split


def _preferred_cuts(view_N: Tensor, unit_N: Tensor, num_views: int) -> Tensor:
    """Return before which views a cut splits no unit, [num_views + 1] bool."""
    _, unit_N = unit_N.unique(return_inverse=True)
    count = int(unit_N.max()) + 1
    first_U = view_N.new_full((count,), num_views).scatter_reduce_(0, unit_N, view_N, "amin")
    last_U = view_N.new_zeros(count).scatter_reduce_(0, unit_N, view_N, "amax")
    # A unit over views 2 to 5 forbids the cuts before 3, 4 and 5.
    steps = view_N.new_zeros(num_views + 2)
    steps.index_add_(0, first_U + 1, torch.ones_like(first_U)).index_add_(0, last_U + 1, -torch.ones_like(last_U))
    return steps.cumsum(0)[: num_views + 1] == 0


def _end_of(
    begin: int, lengths: list[int], is_preferred_cut: list[bool], max_tokens: int, *, concatenates_rows: bool
) -> tuple[int, bool]:
    """Return the end of a micro-batch that begins at view `begin`, and whether it splits no unit."""
    longest, total, furthest, furthest_preferred = 0, 0, begin + 1, begin
    for end in range(begin + 1, len(lengths) + 1):
        longest, total = max(longest, lengths[end - 1]), total + lengths[end - 1]
        tokens = total if concatenates_rows else longest * (end - begin)
        if end > begin + 1 and tokens > max_tokens:
            break
        furthest = end
        if is_preferred_cut[end]:
            furthest_preferred = end
    if furthest_preferred > begin:
        return furthest_preferred, True
    return furthest, False


def loss_gradient(loss: Callable[[Tensor], Tensor], logps_N: Tensor) -> Tensor:
    """Compute the derivative [N] of a loss by each log-probability: the weights of terms in the second sweep."""
    leaf_N = logps_N.detach().requires_grad_()
    (gradient_N,) = torch.autograd.grad(loss(leaf_N), leaf_N, allow_unused=True)
    return torch.zeros_like(logps_N) if gradient_N is None else gradient_N
