"""Mapping between rows of a checkpoint's tensors and rows of our parameters.

Most are the same tensor under another name. A checkpoint may also fuse several of ours in one tensor (a
query_key_value), or split one of ours into several (a tensor for each expert). So a tensor is treated as a list of rows
here: the last axis is a row, and all other axes are flattened.
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
    """Rows that are contiguous both in a checkpoint's tensor and in our parameter."""

    ours: str
    """Name of our parameter."""
    our_begin: int
    """Index of the first row in our parameter."""
    stored: str
    """Name of the checkpoint's tensor."""
    stored_begin: int
    """Index of the first row in the checkpoint's tensor."""
    num_rows: int
    """Number of rows."""


class Layout:
    """The pieces of a whole policy, by our parameter and by the checkpoint's tensor."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], stored_names: Mapping[str, Sequence[str]]) -> None:
        """Compute the pieces of all parameters.

        Args:
            shapes: shapes of our parameters.
            stored_names: the checkpoint's tensors of each parameter, in the order of its rows; each has an equal share.
                Parameters that share a tensor are concatenated in the order of `shapes`.
        """
        self.of_ours: dict[str, list[Piece]] = {}
        """The pieces of each parameter, in the order of its rows."""
        self.of_stored: dict[str, list[Piece]] = {}
        """The pieces of each of the checkpoint's tensors, in the order of its rows."""
        self.stored_shapes: dict[str, list[int]] = {}
        """Shapes of the checkpoint's tensors."""
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

    def meta_tensors(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make the checkpoint's tensors on the meta device: shapes and types alone."""
        return {
            stored: torch.empty(shape, dtype=weights[self.of_stored[stored][0].ours].dtype, device="meta")
            for stored, shape in self.stored_shapes.items()
        }

    def stored(self, name: str, weights: Mapping[str, Tensor]) -> Tensor:
        """Assemble one of the checkpoint's tensors from ours; a view if it comes from a single one."""
        parts = [
            _as_rows(weights[piece.ours])[piece.our_begin : piece.our_begin + piece.num_rows]
            for piece in self.of_stored[name]
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def rows_of(shape: Sequence[int]) -> int:
    """Count the rows of a tensor of that shape. In a vector, each number is a row."""
    return math.prod(shape[:-1]) if len(shape) > 1 else shape[0]


def pieces_in_range(pieces: Sequence[Piece], begin: int, end: int) -> Iterator[tuple[str, slice]]:
    """Yield the checkpoint's tensors and their rows that hold rows `begin` to `end` of the parameter of these pieces.

    An empty range yields no rows of the first tensor.
    """
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
