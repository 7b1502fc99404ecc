"""Views for block-causal policies: a clean canvas, followed by all noisy states of its blocks.

A slot of a block-causal policy attends to its own block and to the finished blocks before it. So the predictions of a
block depend on a noisy canvas only through that block's tokens. All states of one completion's blocks, whichever
canvases they are from, can share a row, each attending to the clean blocks before it. Scoring a completion at its own
denoise steps takes one row: its canvas once, and each block once more per step. (TraceRL, arXiv 2509.06949, takes a
row [noisy | clean] for the n-th steps of all blocks, and counts blocks from the prompt's end.)

Shape letters: R canvases, S slots of one, K slots of a block, N scored tokens, Q scored blocks, D different states of
them, V different clean canvases, which are the views, W slots of the widest row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from learner.estimators.views import BlockRows, Views, deduplicated_views, unique_rows
from learner.model.deferred import torch
from learner.model.targets import CLEAN, PADDING

if TYPE_CHECKING:
    from torch import Tensor


def views_of(
    noisy_RS: Tensor,
    lengths_R: Tensor,
    rows_N: Tensor,
    columns_N: Tensor,
    targets_N: Tensor,
    *,
    clean_RS: Tensor,
    block_length: int | None,
) -> Views:
    """Build `views_of_blocks`, or `deduplicated_views`, which needs no clean canvases, if `block_length` is None."""
    scored = lengths_R, rows_N, columns_N, targets_N
    if block_length is None:
        return deduplicated_views(noisy_RS, *scored)
    return views_of_blocks(noisy_RS, *scored, clean_RS=clean_RS, block_length=block_length)


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
    """Build views that hold each scored block as its noisy canvas shows it, after the clean blocks before it.

    As in `deduplicated_views`, token n is scored on canvas `rows_N`, column `columns_N`, and views keep the order of
    the first canvas that each serves. `clean_RS` are the canvases without noise.
    """
    num_blocks = -(-noisy_RS.shape[1] // block_length)
    places_K = torch.arange(block_length, device=noisy_RS.device)
    first_V, view_R = unique_rows(torch.cat((clean_RS, lengths_R[:, None]), dim=1))
    lengths_V = lengths_R[first_V]
    cell_Q, block_of_token_N = (rows_N * num_blocks + columns_N // block_length).unique(return_inverse=True)
    canvas_Q, block_Q = cell_Q // num_blocks, cell_Q % num_blocks
    columns_QK = block_Q[:, None] * block_length + places_K
    shown_QK = noisy_RS[canvas_Q[:, None], columns_QK.clamp(max=noisy_RS.shape[1] - 1)]
    block_of_view_Q = view_R[canvas_Q] * num_blocks + block_Q
    # Sorted by view, then block: states are in the order of their blocks in a row.
    states_D, state_Q = torch.cat((block_of_view_Q[:, None], shown_QK), dim=1).unique(dim=0, return_inverse=True)
    view_D, block_D = states_D[:, 0] // num_blocks, states_D[:, 0] % num_blocks
    number_D = torch.arange(len(view_D), device=view_D.device) - torch.searchsorted(view_D, view_D)
    # No state attends to clean slots from a row's last scored block on, so they are left out.
    context_V = torch.zeros_like(lengths_V).scatter_reduce_(0, view_D, block_D * block_length, "amax")
    used_V = context_V + torch.zeros_like(lengths_V).index_add_(0, view_D, torch.full_like(view_D, block_length))
    begin_D = context_V[view_D] + number_D * block_length
    # Without any slot to score, a row has one fill slot: the passes must run, because other ranks wait for them.
    ids_VW, rows = _rows(clean_RS[first_V], context_V, max(1, int(used_V.max())), block_length)
    where = view_D[:, None], begin_D[:, None] + places_K
    columns_DK = block_D[:, None] * block_length + places_K
    ids_VW[where], rows.columns[where] = states_D[:, 1:], columns_DK
    rows.states[where] = torch.where(columns_DK < lengths_V[view_D, None], number_D[:, None], PADDING)
    slots_N = view_D[state_Q] * ids_VW.shape[1] + begin_D[state_Q]
    slots_M, scored_N = (slots_N[block_of_token_N] + columns_N % block_length).unique(return_inverse=True)
    return Views(ids=ids_VW, lengths=used_V, slots=slots_M, scored=scored_N, targets=targets_N, blocks=rows)


def _rows(clean_VS: Tensor, context_V: Tensor, width: int, block_length: int) -> tuple[Tensor, BlockRows]:
    """Return rows [V, W] that begin with the clean slots; the states after them are not written yet."""
    columns_W = torch.arange(width, device=clean_VS.device)
    ids_VW = clean_VS[:, columns_W.clamp(max=clean_VS.shape[1] - 1)]
    states_VW = torch.where(columns_W < context_V[:, None], CLEAN, PADDING)
    columns_VW = torch.where(columns_W < context_V[:, None], columns_W, 0)
    return ids_VW, BlockRows(columns=columns_VW, states=states_VW, block_length=block_length)
