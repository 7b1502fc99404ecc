"""Remembered keys and values: what a cached denoise step attends to without computing it again.

Shape letters: S slots, B rows, L queried columns, W width of a canvas, K key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """One block's part of a memory, for some of its rows."""

    keys: Tensor
    """[S, W + 1, K, E], rotated; the last column takes what is to be forgotten. Likewise `values`, not rotated."""
    values: Tensor
    rows: Tensor
    """[B] the rows of this forward."""
    are_first: bool
    """Whether they are rows 0, 1, ... B - 1."""
    width: int
    """W of this forward: no canvas is longer."""

    def update(self, columns_BL: Tensor | None, k_BKLE: Tensor, v_BKLE: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of these columns (None: of all); return those of the whole canvases."""
        if columns_BL is None:
            self.keys[self.rows, : self.width] = k_BKLE.transpose(1, 2)
            self.values[self.rows, : self.width] = v_BKLE.transpose(1, 2)
            return k_BKLE, v_BKLE
        # Whole columns are copied to one flat index: several times as fast as rows and columns apart.
        flat = (self.rows[:, None] * self.keys.shape[1] + columns_BL).flatten()
        self.keys.flatten(0, 1).index_copy_(0, flat, k_BKLE.transpose(1, 2).flatten(0, 1))
        self.values.flatten(0, 1).index_copy_(0, flat, v_BKLE.transpose(1, 2).flatten(0, 1))
        # Without a copy where the rows are the first ones, as in a full batch.
        rows = slice(len(self.rows)) if self.are_first else self.rows
        return self.keys[rows, : self.width].transpose(1, 2), self.values[rows, : self.width].transpose(1, 2)


Held = tuple[Tensor, Tensor]
"""Keys and values of one block: [S, W + 1, K, E] each."""


class Memory:
    """Keys and values of a batch of canvases, of every block of a network."""

    def __init__(self, held: Sequence[Held], rows_B: Tensor, width: int, *, are_first: bool) -> None:
        """Look at `rows_B` of what each block holds, at canvases of `width` columns.

        No two of the tensors share their storage: of one that is written into, a compiler copies all that does.
        `are_first` says that these are rows 0, 1, ... B - 1: they are then read without a copy.
        """
        self._held, self._rows_B, self.width, self._are_first = held, rows_B, width, are_first

    def layer(self, index: int) -> LayerMemory:
        """The part of one block."""
        return LayerMemory(*self._held[index], self._rows_B, self._are_first, self.width)
