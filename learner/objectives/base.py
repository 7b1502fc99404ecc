"""What all objectives share: log-probabilities in, one number to minimise out.

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

MOST_LOG_RATIO = 20.0
"""Log-ratios beyond are cut before they are exponentiated: e^88 is infinite in float32, and times an advantage of zero
no number. (verl's bound; a ratio of 5e8 is no estimate of anything.)"""


def bounded(log_ratios: Tensor) -> Tensor:
    """Log-ratios within `MOST_LOG_RATIO`, with no gradient beyond."""
    return log_ratios.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)


def is_cut(log_ratios: Tensor) -> Tensor:
    """1 where `bounded` changes a log-ratio, else 0: what is reported."""
    return (log_ratios.detach().abs() > MOST_LOG_RATIO).float()


@dataclass(frozen=True, kw_only=True, slots=True)
class Logps:
    """Log-probabilities of the terms, in nats."""

    new: Tensor
    """[N] of the policy that is trained; gradients flow through it. Where the objective needs a teacher, its divergence
    from the teacher at each term's slot, in nats."""
    old: Tensor
    """[N] of the policy at the start of the round, under the same masks."""
    reference: Tensor | None
    """[N] of the reference; None where the objective asks for none."""
    sampled: Tensor
    """[N] what the sampler recorded of the token when it committed it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What an objective says of some terms."""

    total: Tensor
    """[] to be minimised: these terms' share of the round's loss."""
    per_unit: Mapping[str, Tensor] = field(default_factory=dict)
    """[U] each, without gradient: what is reported, by name. Of two ratios of a unit both: [2 U]."""


class Objective(Protocol):
    """A config that computes its loss."""

    @property
    def name(self) -> str:
        """What the recipe calls it."""

    @property
    def level(self) -> Level:
        """What counts as one action."""

    @property
    def normalize_by(self) -> Normalize:
        """What the round's loss is a mean over."""

    @property
    def weigh_by_length(self) -> bool:
        """Whether a unit counts for its completion's covered slots."""

    @property
    def compares_groups(self) -> bool:
        """Whether the loss of a row depends on the likelihoods of the other rows of its group."""

    @property
    def needs_old(self) -> bool:
        """Whether the old log-probabilities are looked at."""

    @property
    def needs_reference(self) -> bool:
        """Whether there must be a reference policy."""

    @property
    def needs_teacher(self) -> bool:
        """Whether terms are compared with a teacher's distributions: `Logps.new` then holds divergences."""

    @property
    def weighs_rows(self) -> bool:
        """Whether rows are weighed by it, once before the first update, and no update looks at it."""

    @property
    def needs_float32_head(self) -> bool:
        """Whether logits that are rounded to half precision would change what it does."""

    def refusal(self, estimator: Estimator, max_staleness: int) -> str | None:
        """Why it cannot go with an estimator, or with completions so many versions old; None where it can.

        What is the same for all objectives is `unfit` (`learner/objectives/fitting.py`).
        """

    def sampler_refusal(self, sampler: SamplerFacts) -> str | None:
        """Why it cannot learn from completions that are sampled like this; None where it can."""

    def loss(self, terms: Terms, logps: Logps, rows: RowFacts) -> Loss:
        """The loss of some terms: whole units, whose importance is their share of the round's loss.

        Args:
            terms: what was scored.
            logps: the log-probabilities.
            rows: the rank's rows.
        """
