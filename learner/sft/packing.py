"""Packing: several short documents in one row of a batch, to reduce padding.

Which documents share a row changes no loss and no gradient: attention stays inside a document
(`learner.model.attention.masks.within_documents`), and documents are never split.

Shape letters: B documents, S slots of the widest one, R rows, W slots of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


_PADDING = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    """Documents, several in a row."""

    ids: Tensor
    """[R, W] int64."""
    documents: Tensor
    """[R, W] int64: the document index of each slot; -1 is padding."""
    rows: Tensor
    """[B] int64: the row of each document."""
    starts: Tensor
    """[B] int64: the first column of each document in its row."""


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign documents to rows: the longest first, each to the first row that has room.

    It needs at most 11/9 of the fewest rows possible, plus two thirds of a row (Dosa, ESCAPE 2007). The earlier of two
    equally long documents comes first, so the rows depend only on the lengths.

    Raises ValueError if a document is longer than `capacity`.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for document in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[document]
        if length > capacity:
            raise ValueError(f"a document of {length} tokens does not fit into a row of {capacity}")
        row = next((index for index, left in enumerate(room) if left >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(document)
        room[row] -= length
    return rows


def pack(ids_BS: Tensor, lengths_B: Tensor, capacity: int) -> PackedRows:
    """Pack the first `lengths_B` slots of each document into rows of at most `capacity` slots."""
    lengths = lengths_B.tolist()
    row_of, start_of, width = [0] * len(lengths), [0] * len(lengths), 0
    assignment = first_fit_decreasing(lengths, capacity)
    for row, documents in enumerate(assignment):
        used = 0
        for document in documents:
            row_of[document], start_of[document] = row, used
            used += lengths[document]
        width = max(width, used)
    device = ids_BS.device
    rows_B, starts_B = torch.tensor(row_of, device=device), torch.tensor(start_of, device=device)
    document_N, column_N = (torch.arange(ids_BS.shape[1], device=device) < lengths_B[:, None]).nonzero(as_tuple=True)
    target_N = rows_B[document_N], starts_B[document_N] + column_N
    ids_RW = ids_BS.new_zeros(len(assignment), width)
    ids_RW[target_N] = ids_BS[document_N, column_N]
    documents_RW = torch.full_like(ids_RW, _PADDING)
    documents_RW[target_N] = document_N
    return PackedRows(ids=ids_RW, documents=documents_RW, rows=rows_B, starts=starts_B)


def padding_share(num_tokens: Sequence[int], width: int) -> float:
    """Return the share of slots without a token if each document has a row of `width` slots."""
    return 1 - sum(num_tokens) / (len(num_tokens) * width)


def packed_padding_share(num_tokens: Sequence[int], batch_size: int) -> float:
    """Return the same for documents that are packed, `batch_size` at a time and in their order."""
    capacity, num_slots = max(num_tokens), 0
    for start in range(0, len(num_tokens), batch_size):
        batch = num_tokens[start : start + batch_size]
        rows = first_fit_decreasing(batch, capacity)
        num_slots += len(rows) * max(sum(batch[index] for index in row) for row in rows)
    return 1 - sum(num_tokens) / num_slots
