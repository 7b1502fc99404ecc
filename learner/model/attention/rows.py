"""Rows of unequal length back to back in one, without padding: what they are told apart by.

Shape letters: B rows, T tokens of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

# The kernel takes queries and keys in runs of so many: told of a longer row than there is, it has nothing to do there.
_RUN = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """How long rows are that lie back to back."""

    each: tuple[int, ...]
    """Of each row, on the host, which so waits for no device."""
    ends: Tensor
    """[B + 1] int32: 0, then where each row ends; on the device."""
    bound: int
    """None is longer: the longest rounded up to a whole run of the kernel's, so that a compiler sees few of them. Never
    1, for which the kernel, of grouped heads, takes it that every row has a query (torch, flash_api.cpp)."""

    @classmethod
    def of(cls, each: Sequence[int], ends: Tensor) -> Lengths:
        """Those of so long rows."""
        return cls(each=tuple(each), ends=ends, bound=max(1, -(-max(each) // _RUN)) * _RUN)

    @property
    def longest(self) -> int:
        """Of the longest row."""
        return max(self.each)


@dataclass(frozen=True, kw_only=True, slots=True)
class RaggedRows:
    """The rows that one row of tokens is made of."""

    positions: Tensor
    """[1, T] int64: the place of each token in its row, from 0."""
    tokens: Lengths
    """How many tokens each has."""
    asked: Lengths
    """How many slots of each are asked for, in the order of the rows; of a row it may be none, of all it is not."""

    @classmethod
    def of(cls, lengths_B: Tensor, asked_B: Tensor, upload: Callable[[Tensor], Tensor]) -> RaggedRows:
        """Of rows of so many tokens, of which so many are asked for: both on the CPU, from which `upload` takes them to
        where the policy computes."""
        columns_BL = torch.arange(int(lengths_B.max())).expand(len(lengths_B), -1)
        positions_T = columns_BL[columns_BL < lengths_B[:, None]]
        return cls(
            positions=upload(positions_T[None]), tokens=_lengths(lengths_B, upload), asked=_lengths(asked_B, upload)
        )


def _lengths(each_B: Tensor, upload: Callable[[Tensor], Tensor]) -> Lengths:
    ends = torch.cat((each_B.new_zeros(1), each_B.cumsum(0))).int()
    return Lengths.of(each_B.tolist(), upload(ends))
