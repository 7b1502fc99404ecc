"""Attention within rows that lie back to back in one, without padding and without a mask.

Whatever goes token by token (norms, products, experts, the head) does not see where a row ends. What does are rotary
positions, which count from 0 in each row, and attention. On a GPU that is one kernel for all rows
(`torch.nn.attention.varlen`, FlashAttention's); a mask, which padding needs, shuts that kernel out.

Shape letters: T tokens of all rows, Q queries of all, H query heads, K key-value heads, E head width. A leading 1 is
the one row that all are in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from learner.model.attention.rows import Lengths

_HALF = (torch.bfloat16, torch.float16)


def has_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether one kernel attends within all rows: on CUDA from compute capability 8 on (Ampere), in half precision,
    with heads of at most 256 numbers, a multiple of 8. So it is in torch 2.11 to 2.13, which have none for a CPU or for
    float32.
    """
    if device.type != "cuda" or dtype not in _HALF or head_dim % 8 or head_dim > 256:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_properties(device).major >= 8


@dataclass(frozen=True, kw_only=True, slots=True)
class WithinRows:
    """What queries may look at: the keys of their own row, all of them."""

    queries: Lengths
    """How many of each row; of some it may be none."""
    keys: Lengths
    """How many of each row."""

    def attend(self, q_1HQE: Tensor, k_1KTE: Tensor, v_1KTE: Tensor) -> Tensor:
        """What each query gathers, [1, H, Q, E]: by the kernel where there is one, else row by row."""
        if has_kernel(q_1HQE.device, q_1HQE.dtype, q_1HQE.shape[-1]):
            return self._by_kernel(q_1HQE, k_1KTE, v_1KTE)
        return self._row_by_row(q_1HQE, k_1KTE, v_1KTE)

    def _by_kernel(self, q_1HQE: Tensor, k_1KTE: Tensor, v_1KTE: Tensor) -> Tensor:
        # Here and not above: it imports torch's compiler, a second for every process that loads a policy.
        from torch.nn.attention.varlen import varlen_attn

        is_told = _is_grouped(q_1HQE, k_1KTE) and _is_told_of_groups(varlen_attn)
        groups: dict[str, Any] = {"enable_gqa": True} if is_told else {}
        mixed_QHE = varlen_attn(
            q_1HQE.squeeze(0).transpose(0, 1),
            k_1KTE.squeeze(0).transpose(0, 1),
            v_1KTE.squeeze(0).transpose(0, 1),
            self.queries.ends,
            self.keys.ends,
            self.queries.bound,
            self.keys.bound,
            **groups,
        )
        assert isinstance(mixed_QHE, Tensor), "without statistics it is the output alone"
        return mixed_QHE.transpose(0, 1)[None]

    def _row_by_row(self, q_1HQE: Tensor, k_1KTE: Tensor, v_1KTE: Tensor) -> Tensor:
        of_rows = zip(
            q_1HQE.split(self.queries.each, dim=2),
            k_1KTE.split(self.keys.each, dim=2),
            v_1KTE.split(self.keys.each, dim=2),
            strict=True,
        )
        is_grouped = _is_grouped(q_1HQE, k_1KTE)
        return torch.cat([F.scaled_dot_product_attention(*of_row, enable_gqa=is_grouped) for of_row in of_rows], dim=2)


def _is_grouped(q_1HQE: Tensor, k_1KTE: Tensor) -> bool:
    return q_1HQE.shape[1] != k_1KTE.shape[1]


@cache
def _is_told_of_groups(varlen_attn: Callable[..., Any]) -> bool:
    """Whether it wants to know that key-value heads are shared. In torch 2.11 it does not ask, and its kernel, which is
    the same, shares them."""
    return "enable_gqa" in signature(varlen_attn).parameters
