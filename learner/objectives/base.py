"""The interface of objectives: from log-probabilities to a loss.

Shape letters: N terms, U units, B rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Protocol

from pydantic import Field

from learner.estimators.base import Estimator, SamplerFacts
from learner.estimators.groupings import Level
from learner.estimators.terms import Terms
from learner.objectives.units import Normalize, RowFacts

if TYPE_CHECKING:
    from torch import Tensor

Coefficient = Annotated[float, Field(ge=0)]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before they are exponentiated: e^89 overflows float32, and inf times an advantage of 0
is NaN. (verl's bound; a ratio of 5e8 estimates nothing.)"""


def clamp_log_ratios(log_ratios: Tensor) -> Tensor:
    """Clamp log-ratios to `MAX_LOG_RATIO`, with no gradient beyond it."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def is_clamped(log_ratios: Tensor) -> Tensor:
    """Return 1 where `clamp_log_ratios` changes a log-ratio, else 0, for a metric."""
    return (log_ratios.detach().abs() > MAX_LOG_RATIO).float()


@dataclass(frozen=True, kw_only=True, slots=True)
class Logps:
    """Log-probabilities of the terms, in nats."""

    new: Tensor
    """[N] of the policy that is trained; gradients flow through it. If the objective needs a teacher, the divergence
    from the teacher at each term's slot, in nats."""
    old: Tensor
    """[N] of the policy at the start of the round, under the same masks."""
    reference: Tensor | None
    """[N] of the reference; None if the objective needs none."""
    sampled: Tensor
    """[N] as the sampler recorded them when it committed the tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The loss of some terms, and its metrics."""

    total: Tensor
    """[] these terms' share of the round's loss."""
    per_unit: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics by name, [U] each, without gradient; [2 U] if a unit has two ratios."""


class Objective(Protocol):
    """Config of an objective, which computes its loss."""

    @property
    def name(self) -> str:
        """Its name in a recipe."""

    @property
    def level(self) -> Level:
        """The granularity of an action."""

    @property
    def normalize_by(self) -> Normalize:
        """What the round's loss is a mean over."""

    @property
    def weigh_by_length(self) -> bool:
        """Whether a unit is weighted by the number of its completion's covered slots."""

    @property
    def compares_groups(self) -> bool:
        """Whether the loss of a row depends on the likelihoods of the other rows of its group."""

    @property
    def needs_old(self) -> bool:
        """Whether the old log-probabilities are used."""

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy is needed."""

    @property
    def needs_teacher(self) -> bool:
        """Whether a teacher is needed: a model besides policy and reference, which terms are compared with."""

    @property
    def precomputes_row_weights(self) -> bool:
        """Whether the reference only gives row weights, once before the first update, and no update uses it."""

    @property
    def tilts_by_reward(self) -> bool:
        """Whether its optimum is the reference tilted by the reward, so that advantages must keep the reward's unit."""

    @property
    def needs_float32_head(self) -> bool:
        """Whether rounding logits to half precision would change the loss materially."""

    def incompatibility(self, estimator: Estimator, max_staleness: int) -> str | None:
        """Return why it cannot be combined with an estimator, or with such a policy lag; None if it can.

        Checks that all objectives share are in `shared_incompatibility` (`learner/objectives/compatibility.py`).
        """

    def sampler_incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return why it cannot learn from completions of such a sampler; None if it can."""

    def loss(self, terms: Terms, logps: Logps, rows: RowFacts) -> Loss:
        """Compute the loss of some terms: whole units, whose importance is their share of the round's loss.

        Args:
            terms: what was scored.
            logps: the log-probabilities.
            rows: the rank's rows.
        """
