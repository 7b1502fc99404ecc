"""Unmasking schedules: which masked slots a denoise step commits, vectorised over rows.

Each row has its schedule: a ranking of its masked slots, and a number of them to take. All of it is arithmetic on
[A, K] tensors, without synchronization with the device.

Shape letters: A rows, K slots of a block.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.request import Schedule

CODES = {schedule: code for code, schedule in enumerate(Schedule)}
"""Number that encodes each schedule in a tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockView:
    """Inputs of the schedules: the state and predictions of each row's block."""

    masked: Tensor
    """[A, K] bool: the slots that can be chosen."""
    confidence: Tensor
    """[A, K] log-probability, in nats, of each slot's most probable token; under `sample_then_select` of its sampled
    one."""
    entropy: Tensor | None
    """[A, K] entropy, in nats; needed by `entropy_bound` only."""
    random_order: Tensor | None
    """[A, K] uniform random numbers; needed by `random` only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSchedules:
    """The schedule of each row, as [A] tensors."""

    code: Tensor
    """`CODES` of the schedule."""
    quota: Tensor
    """Slots that this step commits under the schedules of even shares."""
    minimum: Tensor
    """Minimum number of slots that this step commits under `threshold`: 1, or its quota."""
    log_threshold: Tensor
    """Log of `threshold`, NaN without."""
    factor: Tensor
    """`factor`, NaN without."""
    entropy_bound: Tensor
    """`entropy_bound` in nats, NaN without."""


def select(view: BlockView, rows: RowSchedules, present: Collection[Schedule]) -> tuple[Tensor, Tensor]:
    """Return the slots [A, K] to commit, and [A, K] those of them committed only to reach the minimum.

    Args:
        view: the block of each row.
        rows: its schedule.
        present: the schedules that occur in `rows`; the others are not computed.
    """
    places_K = torch.arange(view.masked.shape[1], device=view.masked.device)
    score_AK, count_A = view.confidence, rows.quota
    # How many slots pass the test of the schedule; all where it has none.
    passed_A = torch.full_like(rows.quota, len(places_K))
    for schedule in present:
        mine_A = rows.code == CODES[schedule]
        if schedule is Schedule.RANDOM and view.random_order is not None:
            score_AK = torch.where(mine_A[:, None], view.random_order, score_AK)
        elif schedule is Schedule.ENTROPY_BOUND and view.entropy is not None:
            score_AK = torch.where(mine_A[:, None], -view.entropy, score_AK)
        elif schedule is Schedule.LEFT_TO_RIGHT:
            above_A = _num_above(view, rows.log_threshold)
            has_threshold_A = mine_A & ~rows.log_threshold.isnan()
            by_place_A = mine_A & (above_A == 0)
            score_AK = torch.where(by_place_A[:, None], -places_K.to(score_AK.dtype), score_AK)
            count_A = torch.where(has_threshold_A, above_A, count_A)
            passed_A = torch.where(has_threshold_A, above_A, passed_A)
    score_AK = torch.where(view.masked, score_AK, -torch.inf)
    # Stable: equal scores, common in low precision, go to the leftmost slot.
    sorted_AK, order_AK = score_AK.sort(dim=-1, descending=True, stable=True)
    for schedule in present:
        if schedule in _COUNTS:
            mine_A = rows.code == CODES[schedule]
            counted_A = _COUNTS[schedule](view, rows, sorted_AK)
            minimum_A = rows.minimum if schedule is Schedule.THRESHOLD else torch.zeros_like(counted_A)
            count_A = torch.where(mine_A, torch.maximum(counted_A, minimum_A), count_A)
            passed_A = torch.where(mine_A, counted_A, passed_A)
    ranks_AK = torch.empty_like(order_AK).scatter_(1, order_AK, places_K.expand_as(order_AK))
    chosen_AK = (ranks_AK < count_A.clamp(min=1)[:, None]) & view.masked
    return chosen_AK, chosen_AK & (ranks_AK >= passed_A[:, None])


def even_share(num_slots: Tensor, num_steps: Tensor, step: Tensor) -> Tensor:
    """Return how many of `num_slots` slots step `step` of `num_steps` commits: an even share, and one more in the first
    steps for the remainder (LLaDA). All int64 of one shape."""
    return num_slots // num_steps + (step < num_slots % num_steps)


def _num_above(view: BlockView, log_threshold_A: Tensor) -> Tensor:
    return (view.masked & (view.confidence > log_threshold_A[:, None])).sum(dim=1)


def _count_threshold(view: BlockView, rows: RowSchedules, _sorted_AK: Tensor) -> Tensor:
    return _num_above(view, rows.log_threshold)


def _count_factor(_view: BlockView, rows: RowSchedules, sorted_AK: Tensor) -> Tensor:
    ranks_K = torch.arange(1, sorted_AK.shape[1] + 1, device=sorted_AK.device)
    return _leading(sorted_AK.exp() >= 1 - rows.factor[:, None] / (ranks_K + 1), sorted_AK)


def _count_entropy_bound(_view: BlockView, rows: RowSchedules, sorted_AK: Tensor) -> Tensor:
    # Sorted from the least uncertain: all but the last, which is the largest, must stay within the bound.
    entropy_AK = torch.where(sorted_AK.isinf(), 0.0, -sorted_AK)
    return _leading(entropy_AK.cumsum(dim=1) - entropy_AK <= rows.entropy_bound[:, None], sorted_AK)


def _leading(passes_AK: Tensor, sorted_AK: Tensor) -> Tensor:
    """Count the masked slots, in order of rank, that pass before the first one that does not."""
    return (passes_AK & ~sorted_AK.isinf()).long().cumprod(dim=1).sum(dim=1)


_COUNTS = {
    Schedule.THRESHOLD: _count_threshold,
    Schedule.FACTOR: _count_factor,
    Schedule.ENTROPY_BOUND: _count_entropy_bound,
}
