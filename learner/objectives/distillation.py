"""On-policy distillation of a diffusion policy, from an autoregressive teacher (OPDLM) or from itself (d-OPSD).

At each masked slot of the policy's own decoding states, the loss is the divergence from the teacher's distribution. In
OPDLM (arXiv 2606.06712, and its code) the teacher reads the completed text, and predicts each slot from the tokens
before it. In d-OPSD (arXiv 2606.18195, and its code) it is the policy that RL started from, in the same state, with
some slots of later blocks filled in from the completion. No gradient flows through the samples, and rewards do not
enter the loss.

Shape letters: N terms, U units, B rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from learner.estimators.base import Estimator, SamplerFacts
from learner.estimators.groupings import Level
from learner.estimators.terms import Terms
from learner.model.config import TransformerConfig
from learner.objectives.base import Logps, Loss
from learner.objectives.compatibility import shared_incompatibility
from learner.objectives.units import Normalize, RowFacts, units_of


class DistillationConfig(BaseModel):
    """The divergence from a teacher at each scored slot: the mean over completions of each one's mean over slots, or
    under `future_share` over denoise steps, of the sum over the step's slots."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    precomputes_row_weights: ClassVar[bool] = False
    needs_float32_head: ClassVar[bool] = False
    compares_groups: ClassVar[bool] = False
    weigh_by_length: ClassVar[bool] = False
    needs_old: ClassVar[bool] = False
    tilts_by_reward: ClassVar[bool] = False
    normalize_by: ClassVar[Normalize] = Normalize.ROW

    name: Literal["distillation"] = "distillation"
    """The objective."""
    teacher: Path | None = None
    """Checkpoint directory of the teacher, of a family with an autoregressive origin (`a2d-llama`, `a2d-qwen2`,
    `a2d-qwen3`). It runs with causal attention, and its output at a slot predicts the next slot. null: the policy that
    the run started from, `RUN/checkpoints/initial`."""
    reverse_kl: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The loss of a slot is (1 - reverse_kl) KL(teacher || policy) + reverse_kl KL(policy || teacher)."""
    top_k: PositiveInt | None = None
    """Sum both terms over only this many of the teacher's most likely tokens (OPDLM at 4B and 8B: 16); null: all."""
    renormalize_top_k: bool = False
    """Compare the distributions of policy and teacher among the `top_k` tokens alone, instead of leaving terms out of
    the sum (d-OPSD)."""
    pointwise_clip: PositiveFloat | None = None
    """Maximum of a single token's term of the sum, nats: greater ones count as this, without gradient (d-OPSD: 0.05).
    null: no maximum."""
    future_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """The teacher is the policy that the rounds began with, and sees this share of the slots of later blocks, as the
    completion fills them (d-OPSD: 0.25). Of each state as many slots count as the sampler committed there: those where
    the teacher's highest logit is greatest. Needs `estimator: {name: step_states}`; null: an autoregressive teacher."""

    @model_validator(mode="after")
    def _one_teacher(self) -> DistillationConfig:
        if self.teacher is not None and self.future_share is not None:
            raise ValueError(f"future_share makes the policy its own teacher, and teacher is {self.teacher}: drop one")
        if self.renormalize_top_k and self.top_k is None:
            raise ValueError("renormalize_top_k needs top_k, the tokens that are left")
        return self

    @property
    def needs_teacher(self) -> bool:
        """Whether the teacher is another model than policy and reference."""
        return self.future_share is None

    @property
    def needs_reference(self) -> bool:
        """Whether the policy that the rounds began with is the teacher."""
        return self.future_share is not None

    @property
    def level(self) -> Level:
        """A scored slot, or with the policy as teacher the slots of a denoise step."""
        return Level.TOKEN if self.future_share is None else Level.PART

    def incompatibility(self, estimator: Estimator, max_staleness: int) -> str | None:
        """Return the reason if the general checks fail; an autoregressive teacher works on any scored slots."""
        own = None
        if estimator.facts.parts_are_steps != (self.future_share is not None):
            own = "objective.future_share and estimator step_states need each other"
        return shared_incompatibility(self, estimator, max_staleness, own=own)

    def sampler_incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return None: it uses no record of the sampler."""
        return None

    def loss(self, terms: Terms, logps: Logps, rows: RowFacts) -> Loss:
        """Sum the divergences of the units, weighted by their shares."""
        units = units_of(terms, self.level)
        divergence_U = units.sum(terms.weights * logps.new)
        return Loss(
            total=(divergence_U * units.importance).sum(),
            per_unit={"teacher_divergence": divergence_U.detach()},
        )


def causal_config(config: TransformerConfig) -> TransformerConfig:
    """Return the config of an autoregressive model with the same weights."""
    return config.model_copy(update={"block_length": 1, "predicts_next": True})


def teacher_incompatibility(teacher: TransformerConfig, policy: TransformerConfig, canvas_tokens: int) -> str | None:
    """Return why a policy cannot learn from a teacher on canvases of `canvas_tokens`; None if it can."""
    try:
        TransformerConfig.model_validate(causal_config(teacher).model_dump())
    except ValidationError:
        return (
            f"is a {teacher.family} policy, and no autoregressive model has its weights; name a checkpoint of one "
            "that was converted from an autoregressive model (`d1 adapt`)"
        )
    if teacher.vocab_size != policy.vocab_size:
        return (
            f"has a vocabulary of {teacher.vocab_size} tokens and the policy one of {policy.vocab_size}; their "
            "distributions can be compared only over the same tokens"
        )
    if teacher.max_sequence_length < canvas_tokens:
        return f"takes canvases of {teacher.max_sequence_length} tokens, and those of the rounds have {canvas_tokens}"
    return None
