"""PPO's clipped importance ratio of tokens, segments or completions, with a KL penalty (GRPO, GSPO).

Shape letters: N terms, U units, B rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from learner.estimators.base import Estimator, SamplerFacts
from learner.estimators.groupings import Level
from learner.estimators.terms import Terms
from learner.model.deferred import torch
from learner.objectives.base import Coefficient, Logps, Loss, clamp_log_ratios, is_clamped
from learner.objectives.compatibility import shared_incompatibility
from learner.objectives.order import order_logps
from learner.objectives.units import Normalize, RowFacts, Units, units_of

if TYPE_CHECKING:
    from torch import Tensor


class Kl(StrEnum):
    """An estimate of KL(policy || reference) from one log-ratio d = reference - policy (Schulman, 2020)."""

    K1 = "k1"
    """-d: unbiased, but without a useful gradient."""
    K2 = "k2"
    """d^2 / 2: the one that stays stable on whole completions (ESPO, arXiv 2512.03759)."""
    K3 = "k3"
    """e^d - d - 1: GRPO's."""


def kl_estimate(kind: Kl, difference: Tensor) -> Tensor:
    """Compute the estimate elementwise, from log-ratios reference - policy in nats."""
    if kind is Kl.K1:
        return -difference
    if kind is Kl.K2:
        return difference.square() / 2
    difference = clamp_log_ratios(difference)
    return difference.exp() - difference - 1


_NARROW = 1e-3


class ClippedRatioConfig(BaseModel):
    """PPO's clipped ratio with a KL penalty. The defaults are diffu-GRPO's (d1, arXiv 2504.12216, equation 3)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    precomputes_row_weights: ClassVar[bool] = False
    compares_groups: ClassVar[bool] = False
    tilts_by_reward: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False
    weigh_by_length: ClassVar[bool] = False

    name: Literal["clipped_ratio"] = "clipped_ratio"
    """The objective."""
    level: Level = Level.TOKEN
    """The unit that the importance ratio is taken of."""
    per_slot: bool = True
    """For ratios of completions, divide log-ratio and KL by the number of slots that the estimate covers (GSPO, ESPO).
    """
    clip_low: Annotated[float, Field(ge=0, lt=1)] | None = 0.5
    """The ratio is clipped below 1 - clip_low (d1: 0.5); null: no clipping."""
    clip_high: Annotated[float, Field(ge=0)] | None = 0.5
    """... and above 1 + clip_high."""
    old: Literal["learner", "sampler"] = "learner"
    """The denominator of the ratio: the learner's likelihoods at the start of the round, under the same masks; or those
    that the sampler recorded, if the estimator scores each token in the state in which it was committed."""
    max_sampler_ratio: Annotated[float, Field(ge=1)] | None = None
    """Truncated importance sampling: weight each unit's loss by its likelihood under the learner at the start of the
    round over the sampler's record, at most this (Flash-RL: 2). It corrects for FP8 samplers and older policies; null:
    off. Needs the estimator that `old: sampler` needs."""
    kl: Kl = Kl.K3
    """The estimate of the KL penalty."""
    kl_against: Literal["reference", "old"] = "reference"
    """The policy that the KL penalty is against: the reference, or the policy at the start of the round."""
    kl_coef: Coefficient = 0.04
    """Weight of the KL penalty; 0 needs no reference model (d1: 0.04)."""
    kl_sums_tokens: bool = False
    """Under `normalize_by: part` a segment's KL is the sum of its tokens' KLs, while its surrogate loss is their mean
    (TraceRL)."""
    min_probability: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Leave out tokens with a lower probability under the policy at the start of the round, except those that the
    sampler committed in the state of the canvas (RLDF: 0.6). The loss stays a mean over draws of each one's mean over
    the tokens that are left. null: all tokens count."""
    nll_coef: Coefficient = 0.0
    """Weight of the negative log-likelihood of the correct completions, on the same canvases: the mean over completions
    of each one's mean over tokens (LightningRL: 0.1). 0 is off."""
    weigh_by_confidence: bool = False
    """Weight the loss of each prediction, KL included, by its probability under the policy at the start of the round
    (MDPO). Needs `level: canvas_token`."""
    weigh_by_unmasking: bool = False
    """Divide the surrogate of each prediction, and not its KL, by the share of the completion's slots that its state
    predicts: a state with fewer masks weighs more (MDPO). Needs `level: canvas_token`."""
    normalize_by: Normalize = Normalize.ROUND
    """What the loss is a mean over."""
    order_temperature: Annotated[float, Field(gt=0)] | None = None
    """Add a second clipped-ratio loss, of the probability that each token's slot was committed before those left
    masked: a softmax over logits at this temperature (MAPG: 1). Needs `estimator.scores_order`; null: off."""

    @model_validator(mode="after")
    def _order_of_completions(self) -> ClippedRatioConfig:
        if self.order_temperature is not None and self.level is not Level.ROW:
            raise ValueError("order_temperature needs level: sequence; an order is no single token's")
        if self.order_temperature is not None and self.old == "sampler":
            raise ValueError("order_temperature needs old: learner; samplers record no logits")
        return self

    @model_validator(mode="after")
    def _weights_of_tokens(self) -> ClippedRatioConfig:
        if self.max_sampler_ratio is not None and self.old == "sampler":
            raise ValueError("max_sampler_ratio needs old: learner; old: sampler has the sampler's record in its ratio")
        if self.max_sampler_ratio is not None and self.order_temperature is not None:
            raise ValueError("max_sampler_ratio excludes order_temperature; samplers record no order's likelihood")
        return self

    @model_validator(mode="after")
    def _sums_of_parts(self) -> ClippedRatioConfig:
        is_of_parts = self.level is Level.TOKEN and self.normalize_by is Normalize.PART
        if self.kl_sums_tokens and not is_of_parts:
            raise ValueError("kl_sums_tokens needs level: token and normalize_by: part; it adds up a part's tokens")
        return self

    @model_validator(mode="after")
    def _likely_tokens_of_draws(self) -> ClippedRatioConfig:
        is_of_draws = self.level is Level.CANVAS_TOKEN and self.normalize_by is Normalize.PART
        if self.min_probability is not None and not (is_of_draws and self.old == "learner"):
            raise ValueError(
                "min_probability needs level: canvas_token, normalize_by: part and old: learner; it leaves out tokens "
                "of single canvases by the learner's likelihoods"
            )
        return self

    @model_validator(mode="after")
    def _weights_of_predictions(self) -> ClippedRatioConfig:
        if (self.weigh_by_confidence or self.weigh_by_unmasking) and self.level is not Level.CANVAS_TOKEN:
            raise ValueError(
                "weigh_by_confidence and weigh_by_unmasking need level: canvas_token; they differ between the states "
                f"that a {self.level} is scored in"
            )
        return self

    @model_validator(mode="after")
    def _nll_of_completions(self) -> ClippedRatioConfig:
        if self.nll_coef and (self.level is not Level.TOKEN or self.normalize_by is not Normalize.ROW):
            raise ValueError(
                "nll_coef needs level: token and normalize_by: row; it is a mean over completions of each one's tokens"
            )
        return self

    @property
    def needs_float32_head(self) -> bool:
        """Whether the clip is so near to 1 that rounding logits to half precision, by a hundredth of a nat and more,
        would clip ratios by chance (MAPG: 3e-4)."""
        return any(clip is not None and 0 < clip < _NARROW for clip in (self.clip_low, self.clip_high))

    @property
    def needs_old(self) -> bool:
        """Whether the ratio, the KL or a weight is of the learner's own likelihoods."""
        return self.old == "learner" or self.weigh_by_confidence or (self.kl_coef > 0 and self.kl_against == "old")

    @property
    def needs_reference(self) -> bool:
        """Whether the KL is to the reference."""
        return self.kl_coef > 0 and self.kl_against == "reference"

    def incompatibility(self, estimator: Estimator, max_staleness: int) -> str | None:
        """Return why it does not fit: a ratio to the sampler's record needs scores in the same states, at any lag."""
        use = self._use_of_record
        own = (
            f"{use}: the estimator must be trajectory with steps_per_segment: 1, law: sampler "
            "and no p_mask_prompt, or its likelihoods are not comparable with the recorded ones"
        )
        return shared_incompatibility(
            self,
            estimator,
            max_staleness,
            own=own if use and not estimator.facts.matches_sampler_record else None,
            takes_order=self.order_temperature is not None,
            takes_stale=use is not None,
        )

    def sampler_incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return why the ratio cannot use the sampler's record, if it is configured to; None if it can."""
        use = self._use_of_record
        if use is None:
            return None
        if self.old == "sampler" and not (sampler.has_reproducible_logps and sampler.has_exact_logps):
            return (
                f"{use}; a sampler with a cache, guidance, top_p, top_k or sample_then_select "
                "does not record the likelihoods that replay"
            )
        # Any distribution that tokens were sampled from can be corrected for, a cached or a restricted one too.
        if not sampler.has_exact_logps:
            return f"{use}; a sampler with sample_then_select does not record the likelihoods that it samples with"
        if sampler.temperature == 0:
            return f"{use}; at rollout.sampling.temperature 0 nothing is drawn"
        if sampler.is_fp8 and self.old == "sampler":
            return (
                "objective.old is sampler, and clipping ratios to an FP8 sampler's likelihoods harms the policy; take "
                "learner.objective.old=learner and learner.objective.max_sampler_ratio=2"
            )
        return None

    @property
    def _use_of_record(self) -> str | None:
        """The setting that takes the sampler's recorded likelihoods; None: no setting does."""
        if self.old == "sampler":
            return "objective.old is sampler"
        if self.max_sampler_ratio is not None:
            return f"objective.max_sampler_ratio is {self.max_sampler_ratio:g}"
        return None

    def loss(self, terms: Terms, logps: Logps, rows: RowFacts) -> Loss:
        """Compute -min(ratio A, clip(ratio) A) + kl_coef KL, weighted by each unit's share.

        The commit order's ratio adds its own surrogate, correct completions add -nll_coef logp, and the better siblings
        of a rollout tree a divergence from their tokens.
        """
        units = units_of(terms, self.level)
        per_unit: dict[str, Tensor] = {}
        if self.min_probability is not None:
            is_kept_N = logps.old >= math.log(self.min_probability)
            if terms.committed is not None:
                is_kept_N = is_kept_N | terms.committed
            units = replace(units, importance=units.sum(_over_kept(terms, is_kept_N)))
            per_unit["kept_tokens"] = units.sum(is_kept_N.float())
        old_N = logps.sampled if self.old == "sampler" else logps.old
        log_ratios = [self._value(terms.token_weights * (logps.new - old_N), units, rows)]
        if self.order_temperature is not None:
            new_N, old_N = (order_logps(terms, logits_N, self.order_temperature) for logits_N in (logps.new, old_N))
            log_ratios.append(self._value(terms.weights * (new_N - old_N), units, rows))
        advantages_U = rows.advantages_of(terms, units)
        surrogates = [self._surrogate(log_ratio_U, advantages_U) for log_ratio_U in log_ratios]
        total_U = torch.stack([loss_U for loss_U, _ in surrogates]).sum(dim=0)
        per_unit |= {name: torch.cat([found[name] for _, found in surrogates]) for name in surrogates[0][1]}
        if self.max_sampler_ratio is not None:
            # Of whole units: a mean per slot, as in `per_slot`, would not weigh completions by their likelihood.
            log_weight_U = units.sum(terms.token_weights * (logps.old - logps.sampled))
            weight_U = clamp_log_ratios(log_weight_U).exp().clamp(max=self.max_sampler_ratio)
            total_U = total_U * weight_U
            per_unit["sampler_ratio"] = weight_U
        if self.weigh_by_unmasking:
            total_U = total_U * rows.sizes[units.rows] / terms.grouping(Level.PART).sizes_of_terms
        if self.weigh_by_confidence:
            units = replace(units, importance=units.importance * logps.old.exp())
        total = (total_U * units.importance).sum()
        if self.kl_coef > 0:
            against_N = logps.old if self.kl_against == "old" else logps.reference
            assert against_N is not None, "the learner has a reference where needs_reference says so"
            difference_U = units.sum(terms.token_weights * (against_N - logps.new))
            kl_U = kl_estimate(self.kl, difference_U) / self._size(units, rows)
            share_U = _shares_of_parts(terms, units) if self.kl_sums_tokens else units.importance
            total, per_unit = total + self.kl_coef * (kl_U * share_U).sum(), {"kl": kl_U.detach()} | per_unit
        if self.nll_coef > 0:
            nll_U, is_correct_U = -units.sum(terms.token_weights * logps.new), rows.correct[units.rows]
            # The mean over correct completions only, while the loss is the mean over all.
            share_U = is_correct_U * units.importance * (rows.num_rows / max(1, rows.num_correct))
            total = total + self.nll_coef * (nll_U * share_U).sum()
            per_unit["nll"] = nll_U.detach()[is_correct_U]
        if rows.sibling_targets is not None:
            weight_N, target_N = rows.sibling_targets[terms.rows, terms.slots].unbind(-1)
            # Padding micro-batches repeat terms with importance 0: do not count them twice.
            weight_N, gap_N = weight_N * (terms.importance > 0), target_N - logps.new
            total = total + (weight_N * gap_N).sum()
            per_unit["consistency"] = gap_N.detach()[weight_N > 0]
        return Loss(total=total, per_unit=per_unit)

    def _surrogate(self, log_ratio_U: Tensor, advantages_U: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute PPO's loss [U] and its metrics."""
        ratio_U = clamp_log_ratios(log_ratio_U).exp()
        clipped_U = ratio_U.clamp(
            -math.inf if self.clip_low is None else 1 - self.clip_low,
            math.inf if self.clip_high is None else 1 + self.clip_high,
        )
        lost_U = clipped_U * advantages_U < ratio_U * advantages_U
        return -(ratio_U * advantages_U).minimum(clipped_U * advantages_U), {
            "ratio": ratio_U.detach(),
            "ratio_cut": is_clamped(log_ratio_U),
            "clip_ratio/low": (lost_U & (advantages_U < 0)).float(),
            "clip_ratio/high": (lost_U & (advantages_U > 0)).float(),
        }

    def _value(self, values_N: Tensor, units: Units, rows: RowFacts) -> Tensor:
        return units.sum(values_N) / self._size(units, rows)

    def _size(self, units: Units, rows: RowFacts) -> Tensor | float:
        return rows.sizes[units.rows] if self.level is Level.ROW and self.per_slot else 1.0


def _over_kept(terms: Terms, is_kept_N: Tensor) -> Tensor:
    """Spread the loss weight of each part evenly over its kept terms, [N]; 0 for the others."""
    parts = units_of(terms, Level.PART)
    weight_U, count_U = parts.sum(terms.importance), parts.sum(is_kept_N.float())
    return is_kept_N * (weight_U / count_U.clamp(min=1))[parts.of_term]


def _shares_of_parts(terms: Terms, units: Units) -> Tensor:
    """Return the loss weight of each unit's part, [U]: the sum over the part's units."""
    parts = units_of(terms, Level.PART)
    part_U = parts.of_term.new_zeros(len(units.rows)).scatter_(0, units.of_term, parts.of_term)
    return units.importance.new_zeros(len(parts.rows)).index_add_(0, part_U, units.importance)[part_U]
