"""Held-out accuracy with its confidence interval."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

_Z_95 = 1.959964


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Number of held-out problems that a policy solves."""

    num_correct: int
    """Problems solved."""
    num_problems: int
    """Problems evaluated."""

    @property
    def accuracy(self) -> float:
        """Share of problems solved, 0 to 1."""
        return self.num_correct / self.num_problems

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the accuracy (Wilson, JASA 1927), which is valid near 0 and 1 too."""
        n, p = self.num_problems, self.accuracy
        centre = (p + _Z_95**2 / (2 * n)) / (1 + _Z_95**2 / n)
        half = _Z_95 / (1 + _Z_95**2 / n) * sqrt(p * (1 - p) / n + _Z_95**2 / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)
