"""KV cache of the denoise steps, over whole canvases.

Shape letters: S slots of the cache, B rows and L columns of a forward, W width of a canvas, K key-value heads, E head
width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerKVCache:
    """KV cache of one transformer block, for some of its rows."""

    keys: Tensor
    """[S, W + 1, K, E], rotated; writes to be discarded go to the last column. `values` likewise, not rotated."""
    values: Tensor
    rows: Tensor
    """[B] the rows of this forward."""
    is_prefix: bool
    """Whether these are rows 0, 1, ... B - 1."""
    width: int
    """W of this forward: no canvas is longer."""

    def update(self, columns_BL: Tensor | None, k_BKLE: Tensor, v_BKLE: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of these columns (None: all columns); return those of the whole canvases."""
        if columns_BL is None:
            self.keys[self.rows, : self.width] = k_BKLE.transpose(1, 2)
            self.values[self.rows, : self.width] = v_BKLE.transpose(1, 2)
            return k_BKLE, v_BKLE
        # Copying whole columns by one flat index is several times as fast as indexing rows and columns separately.
        flat = (self.rows[:, None] * self.keys.shape[1] + columns_BL).flatten()
        self.keys.flatten(0, 1).index_copy_(0, flat, k_BKLE.transpose(1, 2).flatten(0, 1))
        self.values.flatten(0, 1).index_copy_(0, flat, v_BKLE.transpose(1, 2).flatten(0, 1))
        # A slice makes no copy if the rows are the first ones, as in a full batch.
        rows = slice(len(self.rows)) if self.is_prefix else self.rows
        return self.keys[rows, : self.width].transpose(1, 2), self.values[rows, : self.width].transpose(1, 2)


KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one block: [S, W + 1, K, E] each."""


class KVCache:
    """KV cache of a batch of canvases, for all transformer blocks."""

    def __init__(self, keys_values: Sequence[KeysValues], rows_B: Tensor, width: int, *, is_prefix: bool) -> None:
        """Make a view of the rows `rows_B` of each block's cache, for canvases of `width` columns.

        The tensors must not share storage: on a write, a compiler copies every tensor that shares it. `is_prefix` says
        that these are rows 0, 1, ... B - 1, which are read without a copy.
        """
        self._keys_values, self._rows_B, self.width, self._is_prefix = keys_values, rows_B, width, is_prefix

    def layer(self, index: int) -> LayerKVCache:
        """Return the cache of one transformer block."""
        return LayerKVCache(*self._keys_values[index], self._rows_B, self._is_prefix, self.width)
