"""Attention masks: block-causal rows, packed documents, noisy states of blocks, annealing.

Shape letters: B rows, L slots, Q queried slots of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from learner.model.attention.varlen import VarlenAttention
from learner.model.targets import CLEAN

Pattern = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Predicate of (row, query column, key column), broadcastable indices: bool, whether the query attends to the key."""
AttentionMask = Tensor | BlockMask | VarlenAttention | None
"""Attention mask: a bool tensor [B, 1, L or 1, width], FlexAttention's form of one, or concatenated rows; None: all is
visible."""


def block_causal(block_length: Tensor | int, lengths_B: Tensor | None) -> Pattern:
    """Return the block-causal pattern: each slot sees its own block and those before it, within the used slots.

    Args:
        block_length: slots of a block, one number for all rows or one for each.
        lengths_B: used slots of each row; None: all.
    """

    def is_seen(row: Tensor, query: Tensor, column: Tensor) -> Tensor:
        length = block_length if isinstance(block_length, int) else block_length[row]
        is_before = column // length <= query // length
        return is_before if lengths_B is None else is_before & (column < lengths_B[row])

    return is_seen


def positions_in_documents(documents_BL: Tensor) -> Tensor:
    """Compute the position [B, L] of each slot in its document, from 0; a document's slots are contiguous."""
    columns_BL = torch.arange(documents_BL.shape[1], device=documents_BL.device).expand(documents_BL.shape)
    is_first_BL = torch.ones_like(documents_BL, dtype=torch.bool)
    is_first_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    return columns_BL - torch.where(is_first_BL, columns_BL, 0).cummax(dim=1).values


def within_documents(pattern: Pattern | None, documents_BL: Tensor, positions_BL: Tensor) -> Pattern:
    """Return the pattern of packed documents: `pattern` of the positions within a slot's own document, else nothing."""

    def is_seen(row: Tensor, query: Tensor, column: Tensor) -> Tensor:
        is_same = documents_BL[row, query] == documents_BL[row, column]
        return (
            is_same if pattern is None else is_same & pattern(row, positions_BL[row, query], positions_BL[row, column])
        )

    return is_seen


def clean_and_noisy(pattern: Pattern, states_BL: Tensor, columns_BL: Tensor) -> Pattern:
    """Return the pattern of rows that hold a clean canvas and noisy states of its blocks; `pattern` is block-causal.

    A state sees itself and the clean blocks before its own, and is seen by itself alone. So it has the logits of a
    forward of [clean blocks before it | the state]. Block diffusion (arXiv 2503.09573, section 4.1) packs one noisy
    copy behind a clean canvas; here a clean canvas is followed by any number of states of each block.
    """

    def is_seen(row: Tensor, query: Tensor, column: Tensor) -> Tensor:
        own, other = states_BL[row, query], states_BL[row, column]
        here, there = columns_BL[row, query], columns_BL[row, column]
        is_of_own_block = pattern(row, there, here)
        is_clean = (other == CLEAN) & pattern(row, here, there) & ((own == CLEAN) | ~is_of_own_block)
        return is_clean | ((own == other) & (own != CLEAN))

    return is_seen


def annealed(pattern: Pattern | None, annealing_mask_SS: Tensor, positions_BL: Tensor | None) -> Pattern:
    """Return the pattern of attention annealing: `pattern`, restricted to the pairs that are open so far.

    Args:
        pattern: the policy's own pattern; None: all is visible.
        annealing_mask_SS: [query position, key position] bool, whether the pair is open.
        positions_BL: position of each slot in its canvas or document; None: its column.
    """

    def is_seen(row: Tensor, query: Tensor, column: Tensor) -> Tensor:
        here = query if positions_BL is None else positions_BL[row, query]
        there = column if positions_BL is None else positions_BL[row, column]
        is_open = annealing_mask_SS[here, there]
        return is_open if pattern is None else is_open & pattern(row, query, column)

    return is_seen


def make_mask(pattern: Pattern | None, columns_BQ: Tensor, width: int, *, flex: bool) -> Tensor | BlockMask | None:
    """Evaluate a pattern for the queries at `columns_BQ` and `width` key columns.

    With `flex` the result is FlexAttention's `BlockMask`, otherwise a bool tensor. None where all is visible.
    """
    if pattern is None:
        return None
    if flex:

        def is_visible(row: Tensor, _head: Tensor, query: Tensor, column: Tensor) -> Tensor:
            return pattern(row, columns_BQ[row, query], column)

        rows, queries = columns_BQ.shape
        return create_block_mask(is_visible, rows, None, queries, width, device=columns_BQ.device)
    rows_B11 = torch.arange(len(columns_BQ), device=columns_BQ.device)[:, None, None]
    mask = pattern(rows_B11, columns_BQ[:, :, None], torch.arange(width, device=columns_BQ.device))
    return mask[:, None]
