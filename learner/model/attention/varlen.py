"""Varlen attention: bidirectional attention within concatenated rows, without padding or a mask.

Token-wise layers (norms, linear layers, experts, the head) do not depend on where a row ends. Only rotary positions,
which count from 0 in each row, and attention do. On a GPU, one FlashAttention kernel computes all rows
(`torch.nn.attention.varlen`). It takes no mask, so padded rows cannot use it.

Shape letters: T tokens of all rows, Q queries of all rows, H query heads, K key-value heads, E head width. A leading 1
is the single row that holds them all.
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

from learner.model.attention.rows import RowLengths

_HALF = (torch.bfloat16, torch.float16)


def has_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the varlen kernel supports a device, a precision and a head width.

    It needs CUDA with compute capability 8 or above (Ampere), bfloat16 or float16, and a head width of at most 256 that
    is a multiple of 8. This holds for torch 2.11 to 2.13, which have no such kernel for a CPU or for float32.
    """
    if device.type != "cuda" or dtype not in _HALF or head_dim % 8 or head_dim > 256:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_properties(device).major >= 8


@dataclass(frozen=True, kw_only=True, slots=True)
class VarlenAttention:
    """Attention of each query to all keys of its own row."""

    queries: RowLengths
    """Number of queries of each row; may be 0 for some."""
    keys: RowLengths
    """Number of keys of each row."""

    def attend(self, q_1HQE: Tensor, k_1KTE: Tensor, v_1KTE: Tensor) -> Tensor:
        """Compute the attention output [1, H, Q, E]: by the varlen kernel if it is supported, else row by row."""
        if has_kernel(q_1HQE.device, q_1HQE.dtype, q_1HQE.shape[-1]):
            return self._by_kernel(q_1HQE, k_1KTE, v_1KTE)
        return self._row_by_row(q_1HQE, k_1KTE, v_1KTE)

    def _by_kernel(self, q_1HQE: Tensor, k_1KTE: Tensor, v_1KTE: Tensor) -> Tensor:
        # Not at module level: it imports torch's compiler, which takes a second in every process that loads a policy.
        from torch.nn.attention.varlen import varlen_attn

        passes_gqa = _is_grouped(q_1HQE, k_1KTE) and _has_enable_gqa(varlen_attn)
        groups: dict[str, Any] = {"enable_gqa": True} if passes_gqa else {}
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
def _has_enable_gqa(varlen_attn: Callable[..., Any]) -> bool:
    """Whether `varlen_attn` has the argument `enable_gqa`. That of torch 2.11 has not, and shares key-value heads
    without it: the kernel is the same."""
    return "enable_gqa" in signature(varlen_attn).parameters
