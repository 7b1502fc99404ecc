"""What stage 2 is configured by, and what cannot go together."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from learner.advantages import Advantage, Filters
from learner.algorithms import DEFAULT, with_algorithm
from learner.estimators import (
    BlockMasksConfig,
    ElboConfig,
    EstimatorConfig,
    OneStepConfig,
    RandomMasksConfig,
    SamplerFacts,
    TrajectoryConfig,
)
from learner.objectives import (
    ClippedRatioConfig,
    Level,
    LinearBoundConfig,
    Normalize,
    ObjectiveConfig,
    PreferenceConfig,
    SandwichConfig,
    TrajectoryBalanceConfig,
)
from learner.objectives.base import Coefficient
from learner.objectives.distribution_matching import DistributionMatchingConfig


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
    """Most tokens, padding included, of one forward and backward on one worker. The update does not depend on it."""
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
        estimator, objective = self.estimator, self.objective
        is_drawn = isinstance(estimator, ElboConfig) and estimator.values == "draws"
        if is_drawn != isinstance(objective, LinearBoundConfig):
            raise ValueError("objective linear_bound and estimator elbo with values: draws need each other")
        if isinstance(objective, PreferenceConfig | DistributionMatchingConfig) and estimator.name != "elbo":
            raise ValueError(f"objective {objective.name} compares ELBOs: estimator must be elbo, not {estimator.name}")
        if isinstance(objective, TrajectoryBalanceConfig) and not _sums_up(estimator):
            raise ValueError(
                "objective trajectory_balance is of a completion's log-likelihood: estimator must be elbo, or "
                f"trajectory with only: all and, if segments are drawn, weigh: value; not {estimator.name} as it is set"
            )
        if isinstance(objective, SandwichConfig) and estimator.name != "block_masks":
            raise ValueError(f"objective sandwich needs the masks of estimator block_masks, not of {estimator.name}")
        is_of_one_draw = isinstance(estimator, BlockMasksConfig) and estimator.num_draws == 1
        if isinstance(objective, SandwichConfig) and objective.mix > 0 and is_of_one_draw:
            raise ValueError(
                f"objective.mix is {objective.mix:g}, and of one draw both bounds have the same gradient: "
                "estimator.num_draws must be 2 or more, or mix 0"
            )
        is_exact = isinstance(estimator, TrajectoryConfig) and estimator.is_exact
        if self._takes_recorded and not is_exact:
            raise ValueError(
                "objective.old is sampler: the estimator must be trajectory with steps_per_segment: 1, law: sampler "
                "and no p_mask_prompt, or its likelihoods are not comparable with the recorded ones"
            )
        is_off_policy = self._takes_recorded or isinstance(objective, TrajectoryBalanceConfig)
        if self.max_staleness and not is_off_policy:
            raise ValueError(
                f"max_staleness is {self.max_staleness}: completions of an older policy are corrected for by what the "
                "sampler recorded, so that objective.old must be sampler (with estimator trajectory, "
                "steps_per_segment: 1 and law: sampler), or the objective trajectory_balance, or max_staleness 0"
            )
        scores_order = isinstance(estimator, TrajectoryConfig) and estimator.scores_order
        if scores_order != (isinstance(objective, ClippedRatioConfig) and objective.order_temperature is not None):
            raise ValueError("objective.order_temperature and estimator.scores_order need each other")
        if objective.normalize_by is Normalize.PART and _is_in_several_parts(objective.level, estimator):
            what = "token" if objective.level is Level.TOKEN else "completion"
            raise ValueError(
                f"objective.normalize_by is part, and estimator {estimator.name} scores a {what} in several draws or "
                "segments, so that it belongs to no single one; take round, group or row"
            )
        return self

    @property
    def _takes_recorded(self) -> bool:
        """Whether ratios are to the likelihoods that the sampler recorded."""
        return isinstance(self.objective, ClippedRatioConfig) and self.objective.old == "sampler"

    def refusal(self, sampler: SamplerFacts) -> str | None:
        """Why this cannot learn from completions sampled like this; None where it can."""
        if self._takes_recorded:
            if not sampler.records_law:
                return (
                    "objective.old is sampler; a sampler with a cache, guidance, top_p, top_k or sample_then_select "
                    "does not record the likelihoods that replay"
                )
            if sampler.temperature == 0:
                return "objective.old is sampler; at rollout.sampling.temperature 0 nothing is drawn"
        if self.filters.min_speed_range and not sampler.has_varying_steps:
            return (
                f"filters.min_speed_range is {self.filters.min_speed_range:g}; the sampler takes equally many steps "
                "for every block: set rollout.sampling.threshold, factor or entropy_bound, or min_speed_range 0"
            )
        return self.estimator.refusal(sampler)

    def lr_at(self, round_index: int) -> float:
        """The learning rate of a round."""
        warmup = min(1.0, (round_index + 1) / (self.num_warmup_rounds + 1))
        return self.lr * warmup * (1.0 - (1.0 - self.final_lr_fraction) * round_index / max(1, self.num_rounds))


def _sums_up(estimator: EstimatorConfig) -> bool:
    """Whether the values of a completion's terms add up to its log-likelihood, or a bound or an estimate of it."""
    if isinstance(estimator, TrajectoryConfig):
        return estimator.only == "all" and (estimator.num_sampled is None or estimator.weigh == "value")
    return isinstance(estimator, ElboConfig)


def _is_in_several_parts(level: Level, estimator: EstimatorConfig) -> bool:
    """Whether a unit of this level can be scored in more than one draw or segment of its completion."""
    if isinstance(estimator, TrajectoryConfig):
        # A token is committed in one segment.
        return level is Level.ROW
    if isinstance(estimator, RandomMasksConfig):
        num_parts = 3 if estimator.coupled else 1
    else:
        num_parts = estimator.num_draws if isinstance(estimator, ElboConfig | BlockMasksConfig) else 1
    return level is not Level.PART and num_parts > 1
