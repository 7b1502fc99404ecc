"""What stage 2 is configured by."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from learner.advantages import Advantage, Filters
from learner.algorithms import DEFAULT, with_algorithm
from learner.estimators import EstimatorConfig, OneStepConfig, SamplerFacts
from learner.objectives import ClippedRatioConfig, ObjectiveConfig
from learner.objectives.base import Coefficient


class LearnerConfig(BaseModel):
    """Stage 2: policy gradients. The defaults are d1's (arXiv 2504.12216 and its published configuration)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    num_workers: PositiveInt = 2
    """Ranks of the learner; the policy is sharded over them."""
    num_rounds: NonNegativeInt
    """Rounds to train; each publishes one policy version."""
    groups_per_round: PositiveInt = 16
    """Problems of a round (P)."""
    group_size: Annotated[int, Field(ge=2)] = 6
    """Completions of each problem (G). At least 2: the advantage compares them."""
    inner_updates: PositiveInt = 12
    """Sweeps through each round's completions (mu), of one optimizer step unless `num_minibatches` says otherwise."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps of a sweep, each on another share of the round's completions, in their order (PPO's; TraceRL
    steps so). Whole groups where a loss compares them; a smaller round takes a step for each completion, or group."""
    micro_batch_tokens: PositiveInt = 16384
    """Most tokens of one forward and backward on one worker, with padding where rows have any. The update does not
    depend on it."""
    lr: PositiveFloat = 3e-6
    """Learning rate after warm-up."""
    final_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The rate falls linearly towards this share of `lr` at the end of the rounds; 1 is constant (d1)."""
    num_warmup_rounds: NonNegativeInt = 0
    """Rounds of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """AdamW's."""
    max_grad_norm: PositiveFloat = 0.2
    """Gradients are clipped to this global norm."""
    max_staleness: NonNegativeInt = 0
    """A round trains on completions at most this many policy versions old; 0 is exactly synchronous. Above 0 samplers
    are at work while the learner trains, and `objective.old` must be `sampler`: the ratio is then to the policy that
    sampled, whichever that was. Or the objective is `trajectory_balance`, whose minimum is the same whoever sampled."""
    algorithm: str = DEFAULT
    """A row of `docs/algorithms.md`: it fills in `advantage`, `filters`, `estimator`, `objective`, `inner_updates`,
    `num_minibatches` and `group_size` where this section does not say them."""
    advantage: Advantage = Advantage.GROUP_MEAN
    """How rewards become advantages."""
    filters: Filters = Filters()
    """Completions that are not trained on."""
    estimator: EstimatorConfig = OneStepConfig()
    """Which corrupted canvases give the likelihood."""
    objective: ObjectiveConfig = ClippedRatioConfig()
    """What is minimised."""
    imitation_coef: Coefficient = 0.0
    """Weight of the denoising loss on the round's correct completions, at every update: each is a demonstration, of all
    states that one may decode through. 0 is none. On the method's own canvases alone it is `objective.nll_coef`."""
    max_skipped_rounds: NonNegativeInt = 3
    """Rounds in a row that may be skipped because their loss or gradient is not finite: each is counted as a failure,
    and its batch is kept in the run directory. One more ends the run."""
    reference_sync_rounds: NonNegativeInt = 0
    """Rounds after which the KL reference becomes the current policy; 0 keeps the policy that RL started from.
    (d1 asks for a sync every 64 steps, which does nothing under LoRA.)"""

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, section: Any) -> Any:
        return with_algorithm(section) if isinstance(section, dict) else section

    @model_validator(mode="after")
    def _fitting(self) -> LearnerConfig:
        if (why := self.objective.refusal(self.estimator, self.max_staleness)) is not None:
            raise ValueError(why)
        return self

    def refusal(self, sampler: SamplerFacts) -> str | None:
        """Why this cannot learn from completions sampled like this; None where it can."""
        parts = (self.objective.sampler_refusal, self.filters.refusal, self.estimator.refusal)
        return next((why for refusal in parts if (why := refusal(sampler)) is not None), None)

    def lr_at(self, round_index: int) -> float:
        """The learning rate of a round."""
        warmup = min(1.0, (round_index + 1) / (self.num_warmup_rounds + 1))
        return self.lr * warmup * (1.0 - (1.0 - self.final_lr_fraction) * round_index / max(1, self.num_rounds))
