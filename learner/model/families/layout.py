"""Which rows of a checkpoint's tensors are which rows of ours.

Most are the same tensor under another name. A checkpoint may also hold several of ours one below the other in one
(a query_key_value), and one of ours in several (a tensor for each expert). So a tensor is a list of rows here: its last
axis is a row, and the axes before it count them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Rows that stand together, in a checkpoint and in a policy."""

    ours: str
    """The parameter that they are of."""
    our_begin: int
    """The first of them, in that."""
    stored: str
    """The checkpoint's tensor that they are in."""
    stored_begin: int
    """The first of them, in that."""
    num_rows: int
    """How many they are."""


class Layout:
    """The pieces of a whole policy, by what they are of and by what they are in."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], stored_names: Mapping[str, Sequence[str]]) -> None:
        """Lay parameters out.

        Args:
            shapes: of our parameters.
            stored_names: the tensors that have equal shares of each, in the order of its rows. What shares a tensor
                with others follows those before it.
        """
        self.of_ours: dict[str, list[Piece]] = {}
        """The pieces of each parameter, in the order of its rows."""
        self.of_stored: dict[str, list[Piece]] = {}
        """The pieces of each of the checkpoint's tensors, likewise."""
        self.stored_shapes: dict[str, list[int]] = {}
        """Of the checkpoint's tensors."""
        for name, shape in shapes.items():
            num_rows = rows_of(shape) // len(stored_names[name])
            for index, stored in enumerate(stored_names[name]):
                others = self.of_stored.setdefault(stored, [])
                begin = sum(piece.num_rows for piece in others)
                piece = Piece(
                    ours=name, our_begin=index * num_rows, stored=stored, stored_begin=begin, num_rows=num_rows
                )
                others.append(piece)
                self.of_ours.setdefault(name, []).append(piece)
                self.stored_shapes[stored] = [begin + num_rows, *_row(shape)]

    def outline(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The checkpoint's tensors, on the meta device: shapes and types alone."""
        return {
            stored: torch.empty(shape, dtype=weights[self.of_stored[stored][0].ours].dtype, device="meta")
            for stored, shape in self.stored_shapes.items()
        }

    def stored(self, name: str, weights: Mapping[str, Tensor]) -> Tensor:
        """One of the checkpoint's tensors, put together from ours; a view where it is all in one of them."""
        parts = [
            _as_rows(weights[piece.ours])[piece.our_begin : piece.our_begin + piece.num_rows]
            for piece in self.of_stored[name]
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def rows_of(shape: Sequence[int]) -> int:
    """How many rows a tensor of that shape has. A vector's numbers are rows."""
    return math.prod(shape[:-1]) if len(shape) > 1 else shape[0]


def within(pieces: Sequence[Piece], begin: int, end: int) -> Iterator[tuple[str, slice]]:
    """The checkpoint's tensors that hold the rows from `begin` to `end` of the parameter that the pieces make up, and
    which of their rows those are. No rows are in the first tensor."""
    is_none = True
    for piece in pieces:
        first, last = max(begin, piece.our_begin), min(end, piece.our_begin + piece.num_rows)
        if first < last:
            moved = piece.stored_begin - piece.our_begin
            yield piece.stored, slice(first + moved, last + moved)
            is_none = False
    if is_none:
        yield pieces[0].stored, slice(0, 0)


def _row(shape: Sequence[int]) -> list[int]:
    return list(shape[-1:]) if len(shape) > 1 else []


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten(0, -2) if tensor.ndim > 1 else tensor.detach()
