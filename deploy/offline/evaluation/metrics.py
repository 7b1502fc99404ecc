"""Metrics of a cell: accuracy, pass@k and throughput, with 95 % confidence intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.offline.item import Answer
from deploy.offline.record import CellRecord
from rewards import Outcome
from rewards.score import Score

_NUM_RESAMPLES = 4000
_PASS_AT = (2, 4, 8, 16, 32, 64, 128, 256)
_Floats = NDArray[np.float64]


def compute_metrics(cell: CellRecord) -> dict[str, Any]:
    """Compute the metrics of a cell, as JSON. Shares are 0 to 1; an interval is `[low, high]`.

    Accuracy from one sample per problem has a Wilson interval. Accuracy from several samples, the share of items and
    pass@k have a bootstrap interval over problems, because samples and items of one problem are not independent.
    """
    answers = cell.answers
    groups = list(cell.by_problem.values())
    num_samples = max(map(len, groups))
    generated = [answer for answer in answers if answer.has_room] or answers
    num_tokens, num_forwards = (sum(getattr(one, name) for one in answers) for name in ("num_tokens", "num_forwards"))
    outcomes = Counter(answer.outcome for answer in answers)
    found: dict[str, Any] = {
        "num_problems": len(groups),
        "num_samples": num_samples,
        "num_correct": sum(answer.correct for answer in answers),
        "accuracy": _mean([answer.correct for answer in answers]),
        "accuracy_interval": _mean_interval(
            [_mean([answer.correct for answer in group]) for group in groups], is_binary=num_samples == 1
        ),
        "mean_tokens": num_tokens / len(generated),
        "truncated": _mean([answer.is_truncated for answer in generated]),
        "mean_forwards": num_forwards / len(generated),
        "tokens_per_forward": num_tokens / num_forwards if num_forwards else None,
        "ungraded": sum(count for outcome, count in outcomes.items() if outcome != Outcome.GRADED),
        "worker_seconds": cell.seconds,
    }
    if without_room := list(dict.fromkeys(answer.problem_id for answer in answers if not answer.has_room)):
        found["without_room"] = without_room
    if any(answer.num_items > 1 for answer in answers):
        found |= _items(groups)
    for k in (k for k in _PASS_AT if k <= num_samples):
        # The unbiased estimator from n >= k samples (Chen et al., 2021, section 2.1).
        counts = [(len(group), sum(answer.correct for answer in group)) for group in groups]
        solved = [1 - comb(n - num_correct, k) / comb(n, k) for n, num_correct in counts]
        found |= {f"pass@{k}": _mean(solved), f"pass@{k}_interval": _mean_interval(solved)}
    return found


def _items(groups: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """Return the share of correct items over all problems, such as the empty cells of Sudokus."""
    counts = np.array([[sum(one.num_right for one in group), sum(one.num_items for one in group)] for group in groups])
    right, total = counts.sum(axis=0)

    def share(picked: _Floats) -> _Floats:
        sums = picked.sum(axis=1)
        return np.asarray(sums[:, 0] / sums[:, 1])

    if right in (0, total):
        interval = _mean_interval([float(right > 0)] * len(groups))
    else:
        interval = bootstrap(counts.astype(float), share)
    return {"items": float(right / total), "items_interval": interval}


def _mean_interval(shares: Sequence[float], *, is_binary: bool = False) -> list[float]:
    """Return the bootstrap interval of the mean share; Wilson's if all are binary, or if resampling fails.

    Resampling shares that are all 0 or all 1 would give an interval of no width.
    """
    if is_binary or set(shares) in ({0}, {1}):
        return list(Score(num_correct=round(sum(shares)), num_problems=len(shares)).interval)
    return bootstrap(np.array(shares), lambda picked: picked.mean(axis=1))


def bootstrap(values: _Floats, statistic: Callable[[_Floats], _Floats]) -> list[float]:
    """Return the 95 % percentile bootstrap interval over problems, with a fixed seed."""
    generator = np.random.default_rng(0)
    found = [
        statistic(values[generator.integers(len(values), size=(chunk, len(values)))])
        for chunk in [_NUM_RESAMPLES // 20] * 20
    ]
    low, high = np.quantile(np.concatenate(found), [0.025, 0.975])
    return [float(low), float(high)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
