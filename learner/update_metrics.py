"""What a round's updates are reported by, under TRL's names where it has one.

Shape letters: U units.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from learner.objectives import Loss

Reduce = Callable[[Tensor], Tensor]


class UpdateMetrics:
    """Sums over the units of all inner updates of a round, on all ranks."""

    def __init__(self, sum_over_ranks: Reduce, max_over_ranks: Reduce) -> None:
        self._sum_over_ranks, self._max_over_ranks = sum_over_ranks, max_over_ranks
        self._loss, self._logp, self._num_terms = 0.0, 0.0, 0
        self._sums: dict[str, tuple[float, int]] = {}
        self._squares, self._most = 0.0, 0.0
        self._grad_norms: list[float] = []

    def add(self, loss: Loss, new_N: Tensor, *, counts: bool) -> None:
        """Count some terms in; those of a rank that has nothing to do only by their names, which all ranks share."""
        for name, values_U in loss.per_unit.items():
            total, count = self._sums.get(name, (0.0, 0))
            kept_U = values_U if counts else values_U[:0]
            self._sums[name] = total + kept_U.sum().item(), count + len(kept_U)
        if not counts:
            return
        self._loss += loss.total.item()
        self._logp += new_N.detach().sum().item()
        self._num_terms += len(new_N)
        if "ratio" in loss.per_unit:
            ratio_U = loss.per_unit["ratio"]
            self._squares += ratio_U.square().sum().item()
            self._most = max(self._most, ratio_U.max().item())

    def add_step(self, grad_norm: float) -> None:
        """Count an optimizer step in."""
        self._grad_norms.append(grad_norm)

    def means(self) -> dict[str, float]:
        """Over all ranks; empty when nothing was trained on. A collective."""
        if not self._grad_norms:
            return {}
        num_steps, names = len(self._grad_norms), sorted(self._sums)
        flat = [self._loss, self._logp, self._num_terms, self._squares]
        flat += [value for name in names for value in self._sums[name]]
        loss, logp, num_terms, squares, *rest = self._sum_over_ranks(torch.tensor(flat, dtype=torch.float64)).tolist()
        sums = dict(zip(names, zip(rest[::2], rest[1::2], strict=True), strict=True))
        metrics = {name: total / max(1, count) for name, (total, count) in sums.items()}
        metrics = {_TRL.get(name, name): value for name, value in metrics.items()}
        if "ratio" in sums:
            total, count = sums["ratio"]
            metrics["ratio_max"] = self._max_over_ranks(torch.tensor([self._most])).item()
            metrics["effective_sample_share"] = total**2 / max(1e-30, squares * count)
        if "clip_ratio/low" in sums:
            metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
        return metrics | {
            "loss": loss / num_steps,
            "token_logp": logp / max(1, num_terms),
            "grad_norm": sum(self._grad_norms) / num_steps,
        }


_TRL = {"ratio": "ratio_mean", "clip_ratio/low": "clip_ratio/low_mean", "clip_ratio/high": "clip_ratio/high_mean"}
