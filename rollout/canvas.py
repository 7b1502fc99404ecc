"""The columns of a request's canvas: prompt, completion slots, and the blocks over them.

A bidirectional policy's blocks begin where the prompt ends, and `gen_length` is a multiple of them. A block-causal
policy's are counted from the first column (SDAR, arXiv 2510.06303, and its published loop): the prompt's tail stands in
the first block that is denoised, and the last one may pass `gen_length`; its surplus slots are context of the others.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Canvas:
    """Where a request's slots and blocks are."""

    prompt_length: int
    gen_length: int
    block_length: int
    is_block_causal: bool

    @property
    def end(self) -> int:
        """Columns: the canvas ends where its last block does."""
        return self.block_end(self.prompt_length + self.gen_length - 1)

    @property
    def num_slots(self) -> int:
        """Slots that are denoised: `gen_length`, and what the last block has beyond."""
        return self.end - self.prompt_length

    def block_end(self, column: int) -> int:
        """The column after the block that this one is in."""
        origin = 0 if self.is_block_causal else self.prompt_length
        return origin + ((column - origin) // self.block_length + 1) * self.block_length

    def is_boundary(self, num_slots: int) -> bool:
        """Whether so many slots after the prompt are whole blocks, the first of which may begin in the prompt."""
        column = self.prompt_length + num_slots
        return num_slots == 0 or self.block_end(column - 1) == column
