"""Views of block-causal policies: [noisy | clean] rows, each of which asks about one state of every block at once.

A slot of a block-causal policy sees its own block and the finished ones before it. So a canvas says something of a
block only by what it shows of that block, and the states of one row's blocks that different canvases show can stand in
one row, each behind the clean blocks before it. All of a completion's log-probabilities at its own denoise steps so
take as many rows as a block takes steps, of twice the length (TraceRL, arXiv 2509.06949, over a sampler whose blocks
are counted from the first column).

Shape letters: R canvases, S slots of one, K slots of a block, N scored tokens Q blocks
that are asked about, D different states of them, U different clean rows, V views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from learner.estimators.views import Views
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


def views_of_blocks(
    noisy_RS: Tensor,
    lengths_R: Tensor,
    rows_N: Tensor,
    columns_N: Tensor,
    targets_N: Tensor,
    *,
    clean_RS: Tensor,
    block_length: int,
) -> Views:
    """The fewest views that show each block, behind what is clean before it, as the canvases do that ask about it.

    As `share_equal_views`: token n is scored on canvas `rows_N`, column `columns_N`, and views keep the order of the
    first canvas that each serves. `clean_RS` are the canvases without noise.
    """
    num_canvases, width = noisy_RS.shape
    num_blocks = -(-width // block_length)
    clean_US, of_clean_R = torch.cat((clean_RS, lengths_R[:, None]), dim=1).unique(dim=0, return_inverse=True)
    # Blocks that are asked about, and which state of which row's block each of them is.
    asked_Q, of_asked_N = (rows_N * num_blocks + columns_N // block_length).unique(return_inverse=True)
    canvas_Q, block_Q = asked_Q // num_blocks, asked_Q % num_blocks
    columns_QK = block_Q[:, None] * block_length + torch.arange(block_length, device=noisy_RS.device)
    shown_QK = noisy_RS[canvas_Q[:, None], columns_QK.clamp(max=width - 1)]
    place_Q = of_clean_R[canvas_Q] * num_blocks + block_Q
    states_D, of_state_Q = torch.cat((place_Q[:, None], shown_QK), dim=1).unique(dim=0, return_inverse=True)
    place_D = states_D[:, 0].contiguous()
    # Sorted by place: the states of one block are numbered 0, 1, ..., and the same numbers share a view.
    number_D = torch.arange(len(place_D), device=place_D.device) - torch.searchsorted(place_D, place_D)
    clean_D, most = place_D // num_blocks, len(place_D) + 1
    key_V, of_view_D = (clean_D * most + number_D).unique(return_inverse=True)
    view_Q = of_view_D[of_state_Q]
    first_V = torch.full_like(key_V, num_canvases).scatter_reduce_(0, view_Q, canvas_Q, "amin")
    order_V = first_V.argsort(stable=True)
    rank_V = torch.empty_like(order_V).scatter_(0, order_V, torch.arange(len(order_V), device=order_V.device))
    view_Q = rank_V[view_Q]
    row_V = clean_US[(key_V // most)[order_V]]
    clean_VS, lengths_V = row_V[:, :-1], row_V[:, -1]
    is_inside_QK = columns_QK < width
    ids_VS = clean_VS.clone()
    ids_VS[view_Q[:, None].expand_as(columns_QK)[is_inside_QK], columns_QK[is_inside_QK]] = shown_QK[is_inside_QK]
    slots_M, scored_N = (view_Q[of_asked_N] * width + columns_N).unique(return_inverse=True)
    return Views(
        ids=ids_VS,
        lengths=lengths_V,
        slots=slots_M,
        scored=scored_N,
        targets=targets_N,
        clean=clean_VS,
        block_length=block_length,
    )
