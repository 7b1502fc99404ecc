"""Grouping of terms into units: tokens, draws or segments, or completions.

Reading the number of units from a GPU would wait for all its queued work. So terms are grouped on the CPU, where they
are planned, and the grouping is copied to the device with them.

Shape letters: N terms, U units, T terms that are log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from learner.batch import to_device_async
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


class Level(StrEnum):
    """The granularity of an action: the unit that a ratio is taken of."""

    TOKEN = "token"  # noqa: S105 - no password
    """A token: all terms of a row's slot (GRPO, arXiv 2402.03300)."""
    CANVAS_TOKEN = "canvas_token"  # noqa: S105 - no password
    """A token on one canvas: one that is scored on several canvases has a ratio on each (RLDF, arXiv 2605.25638;
    MDPO, arXiv 2508.13148)."""
    PART = "part"
    """A Monte-Carlo draw or a segment of a row."""
    ROW = "sequence"
    """A whole completion (GSPO, arXiv 2507.18071)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """The units of some terms at one level, in the order of their keys."""

    of_term: Tensor
    """[N] int64: the unit of each term."""
    rows: Tensor
    """[U] int64: the batch's row of each unit."""
    counts: Tensor
    """[U] int64: the number of terms of each unit."""

    @property
    def sizes_of_terms(self) -> Tensor:
        """[N] int64: the number of terms of each term's unit."""
        return self.counts[self.of_term]

    def to(self, device: torch.device) -> Grouping:
        """Copy the grouping to a device."""
        parts = (self.of_term, self.rows, self.counts)
        of_term, rows, counts = (to_device_async(part, device) for part in parts)
        return Grouping(of_term=of_term, rows=rows, counts=counts)


def grouped(rows_N: Tensor, keys_N: Tensor) -> Grouping:
    """Group terms with equal keys into units."""
    keys_U, of_term_N, count_U = keys_N.unique(return_inverse=True, return_counts=True)
    rows_U = rows_N.new_zeros(len(keys_U)).scatter_(0, of_term_N, rows_N)
    return Grouping(of_term=of_term_N, rows=rows_U, counts=count_U)


@dataclass(frozen=True, kw_only=True, slots=True)
class TermLayout:
    """Facts about terms that are computed on the CPU before the terms are copied to a device."""

    groupings: Mapping[Level, Grouping]
    """Their units at every level."""
    num_parts: int
    """One more than the greatest number of a draw or segment."""
    is_logit: Tensor | None
    """[N] bool: the terms that are logits; None: none."""
    is_rival: Tensor | None
    """[N] bool: the terms that are the highest logit of a slot; None: none."""
    tokens: Tensor | None
    """[T] int64: the indices of terms that are log-probabilities; None: all."""

    def to(self, device: torch.device) -> TermLayout:
        """Copy the layout to a device."""
        is_logit, is_rival, tokens = (
            None if part is None else to_device_async(part, device)
            for part in (self.is_logit, self.is_rival, self.tokens)
        )
        return TermLayout(
            groupings={level: grouping.to(device) for level, grouping in self.groupings.items()},
            num_parts=self.num_parts,
            is_logit=is_logit,
            is_rival=is_rival,
            tokens=tokens,
        )
