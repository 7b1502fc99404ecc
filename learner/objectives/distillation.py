"""On-policy distillation of a diffusion policy from an autoregressive teacher (OPDLM).

At each masked slot of the policy's own decoding states, the loss is the divergence from the teacher's distribution
(arXiv 2606.06712, and its code). The teacher reads the completed text and predicts each slot from the tokens before it.
Both distributions are over the whole vocabulary. No gradient flows through the samples, and rewards do not enter the
loss.

Shape letters: N terms, U units, B rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from learner.estimators.base import Estimator, SamplerFacts
from learner.estimators.groupings import Level
from learner.estimators.terms import Terms
from learner.model.config import TransformerConfig
from learner.objectives.base import Logps, Loss
from learner.objectives.compatibility import shared_incompatibility
from learner.objectives.units import Normalize, RowFacts, units_of


class DistillationConfig(BaseModel):
    """The divergence from a teacher at each scored slot: the mean over completions of each one's mean over slots."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    precomputes_row_weights: ClassVar[bool] = False
    needs_float32_head: ClassVar[bool] = False
    compares_groups: ClassVar[bool] = False
    weigh_by_length: ClassVar[bool] = False
    needs_old: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    tilts_by_reward: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = True
    level: ClassVar[Level] = Level.TOKEN
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

    def incompatibility(self, estimator: Estimator, max_staleness: int) -> str | None:
        """Return the reason if the general checks fail; it works on any scored slots."""
        return shared_incompatibility(self, estimator, max_staleness)

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
