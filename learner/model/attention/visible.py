"""What the slots of a row may look at.

Shape letters: B rows, L slots, Q asked slots of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from learner.model.attention.within import WithinRows
from learner.model.wanted import CLEAN

Pattern = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Whether, in a row, the slot at one column sees what stands at another: indices that broadcast, to bool."""
Visible = Tensor | BlockMask | WithinRows | None
"""What slots may look at: a mask [B, 1, L or 1, width] bool, what says the same to FlexAttention, or rows that lie
back to back; None is all."""


def up_to_own_block(block_length: Tensor | int, lengths_B: Tensor | None) -> Pattern:
    """The pattern of block-causal rows: each slot sees its own block and those before it, as far as the row is used.

    Args:
        block_length: slots of a block, of all rows or of each.
        lengths_B: used slots of each row; None: all.
    """

    def is_seen(row: Tensor, query: Tensor, column: Tensor) -> Tensor:
        length = block_length if isinstance(block_length, int) else block_length[row]
        is_before = column // length <= query // length
        return is_before if lengths_B is None else is_before & (column < lengths_B[row])

    return is_seen


def positions_in_documents(documents_BL: Tensor) -> Tensor:
    """[B, L] the place of each slot in its document, from 0; a document's slots stand together."""
    columns_BL = torch.arange(documents_BL.shape[1], device=documents_BL.device).expand(documents_BL.shape)
    is_first_BL = torch.ones_like(documents_BL, dtype=torch.bool)
    is_first_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    return columns_BL - torch.where(is_first_BL, columns_BL, 0).cummax(dim=1).values


def within_documents(sees: Pattern | None, documents_BL: Tensor, positions_BL: Tensor) -> Pattern:
    """The pattern of rows of documents: nothing outside a slot's own, and inside it what `sees` says of positions."""

    def is_seen(row: Tensor, query: Tensor, column: Tensor) -> Tensor:
        is_same = documents_BL[row, query] == documents_BL[row, column]
        return is_same if sees is None else is_same & sees(row, positions_BL[row, query], positions_BL[row, column])

    return is_seen


def beside_clean(sees: Pattern, chunks_BL: Tensor, columns_BL: Tensor) -> Pattern:
    """The pattern of rows of a clean canvas and of noisy states of its blocks, where `sees` is block-causal.

    A state sees itself and the clean blocks before its own, and nothing sees a state but itself: of each it is what a
    forward of [clean blocks before it | the state] gives (block diffusion, arXiv 2503.09573, section 4.1, of two copies
    of a canvas; here of as many states of a block as there are, behind one).
    """

    def is_seen(row: Tensor, query: Tensor, column: Tensor) -> Tensor:
        own, other = chunks_BL[row, query], chunks_BL[row, column]
        here, there = columns_BL[row, query], columns_BL[row, column]
        is_of_own_block = sees(row, there, here)
        is_clean = (other == CLEAN) & sees(row, here, there) & ((own == CLEAN) | ~is_of_own_block)
        return is_clean | ((own == other) & (own != CLEAN))

    return is_seen


def partly_opened(sees: Pattern | None, opened_SS: Tensor, positions_BL: Tensor | None) -> Pattern:
    """The pattern of a policy in training whose attention is not all open yet: of what `sees` shows, what is opened.

    Args:
        sees: the policy's own; None: everyone sees all.
        opened_SS: whether the slot at one place of a canvas sees what stands at another.
        positions_BL: the place of each slot; None: its column.
    """

    def is_seen(row: Tensor, query: Tensor, column: Tensor) -> Tensor:
        here = query if positions_BL is None else positions_BL[row, query]
        there = column if positions_BL is None else positions_BL[row, column]
        is_open = opened_SS[here, there]
        return is_open if sees is None else is_open & sees(row, query, column)

    return is_seen


def make_visible(sees: Pattern | None, columns_BQ: Tensor, width: int, *, flex: bool) -> Tensor | BlockMask | None:
    """What the slots at these columns may look at, of a canvas that is so wide."""
    if sees is None:
        return None
    if flex:

        def is_visible(row: Tensor, _head: Tensor, query: Tensor, column: Tensor) -> Tensor:
            return sees(row, columns_BQ[row, query], column)

        rows, queries = columns_BQ.shape
        return create_block_mask(is_visible, rows, None, queries, width, device=columns_BQ.device)
    rows_B11 = torch.arange(len(columns_BQ), device=columns_BQ.device)[:, None, None]
    visible = sees(rows_B11, columns_BQ[:, :, None], torch.arange(width, device=columns_BQ.device))
    return visible[:, None]
