"""Lengths and positions of ragged rows: rows of unequal length concatenated without padding.

Shape letters: B rows, T tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

# Tile size of the attention kernel, in queries and keys. A bound rounded up to it costs nothing: no tile is added.
_TILE = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLengths:
    """Lengths of concatenated rows, in the forms that the attention kernel needs."""

    each: tuple[int, ...]
    """Length of each row, on the host, so that reading it needs no device synchronization."""
    ends: Tensor
    """[B + 1] int32 on the device: 0, then the end of each row."""
    bound: int
    """Upper bound of the lengths: the longest, rounded up to the kernel's tile, so that a compiler sees few values.
    Never 1: with grouped heads the kernel then assumes that every row has a query (torch, flash_api.cpp)."""

    @classmethod
    def of(cls, each: Sequence[int], ends: Tensor) -> RowLengths:
        """Build the lengths from `each`, and from their `ends` on the device."""
        return cls(each=tuple(each), ends=ends, bound=max(1, -(-max(each) // _TILE)) * _TILE)

    @property
    def longest(self) -> int:
        """Length of the longest row."""
        return max(self.each)


@dataclass(frozen=True, kw_only=True, slots=True)
class RaggedRows:
    """Positions and lengths of rows that are concatenated into one row of tokens."""

    positions: Tensor
    """[1, T] int64: the position of each token in its row, from 0."""
    tokens: RowLengths
    """Number of tokens of each row."""
    queries: RowLengths
    """Number of queried slots of each row, in the order of the rows. It may be 0 for a row, but not for all."""

    @classmethod
    def of(cls, lengths_B: Tensor, num_queries_B: Tensor, upload: Callable[[Tensor], Tensor]) -> RaggedRows:
        """Build the rows from their numbers of tokens and of queried slots.

        Args:
            lengths_B: tokens of each row, on the CPU.
            num_queries_B: queried slots of each row, on the CPU.
            upload: copies a tensor to the policy's device.
        """
        columns_BL = torch.arange(int(lengths_B.max())).expand(len(lengths_B), -1)
        positions_T = columns_BL[columns_BL < lengths_B[:, None]]
        return cls(
            positions=upload(positions_T[None]),
            tokens=_lengths(lengths_B, upload),
            queries=_lengths(num_queries_B, upload),
        )


def _lengths(each_B: Tensor, upload: Callable[[Tensor], Tensor]) -> RowLengths:
    ends = torch.cat((each_B.new_zeros(1), each_B.cumsum(0))).int()
    return RowLengths.of(each_B.tolist(), upload(ends))
