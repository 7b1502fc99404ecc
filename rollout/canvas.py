"""Layout of a request's canvas: prompt, completion slots, and the blocks over them.

A bidirectional policy's blocks begin where the prompt ends, and their length divides `gen_length`. A block-causal
policy's blocks are counted from the first column (SDAR, arXiv 2510.06303, and its reference implementation). So the
first denoised block may contain the tail of the prompt, and the last one may exceed `gen_length`; its surplus slots are
context for the others.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Canvas:
    """Positions of a request's slots and blocks."""

    prompt_length: int
    gen_length: int
    block_length: int
    is_block_causal: bool

    @property
    def end(self) -> int:
        """Number of columns: the canvas ends with its last block."""
        return self.block_end(self.prompt_length + self.gen_length - 1)

    @property
    def num_slots(self) -> int:
        """Number of slots that are denoised: `gen_length`, and the surplus of the last block."""
        return self.end - self.prompt_length

    def block_end(self, column: int) -> int:
        """Return the column after the block that contains this one."""
        origin = 0 if self.is_block_causal else self.prompt_length
        return origin + ((column - origin) // self.block_length + 1) * self.block_length

    def is_boundary(self, num_slots: int) -> bool:
        """Whether `num_slots` slots after the prompt are whole blocks, the first of which may begin in the prompt."""
        column = self.prompt_length + num_slots
        return num_slots == 0 or self.block_end(column - 1) == column
