"""Configuration of stage 2, reinforcement learning: a recipe's section `learner`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from learner.advantages import Advantage, Filters
from learner.algorithms import DEFAULT, with_algorithm
from learner.estimators import EstimatorConfig, OneStepConfig, PredictionsConfig, SamplerFacts, num_states
from learner.estimators.groupings import Level
from learner.objectives import ClippedRatioConfig, Normalize, ObjectiveConfig, PreferenceConfig
from learner.objectives.base import Coefficient
from learner.objectives.value import ValueConfig
from learner.tree.config import ConsistencyConfig

_OF_WHOLE_REWARDS = (Advantage.GROUP_MEAN, Advantage.GROUP_Z, Advantage.ROUND_Z, Advantage.LEAVE_ONE_OUT)


class LearnerConfig(BaseModel):
    """Stage 2, reinforcement learning. The defaults are d1's (arXiv 2504.12216 and its published configuration)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    num_workers: PositiveInt = 2
    """Ranks of the learner; the policy is sharded over them."""
    min_workers: PositiveInt | None = None
    """Fewest ranks to train with: when a machine is lost and its resources do not come back within
    `resource_timeout_s`, the learner goes on with fewer ranks from its newest checkpoint, as a resumed run with so many
    does. Absent: it waits for all `num_workers`."""
    resource_timeout_s: PositiveFloat = 300.0
    """Seconds that the learner waits for the resources of all its ranks, where `min_workers` allows fewer."""
    pairs: Path | None = None
    """Stored preference pairs for the objective `preference`: a file, a directory or a dataset of the hub, as
    `sft.data`. Rounds then train on these instead of completions, and samplers and graders work for evaluations only.
    Rows have `prompt`, `chosen` and `rejected`, or `chosen` and `rejected` as whole conversations. Absent: rounds train
    on graded completions."""
    num_rounds: NonNegativeInt
    """Rounds to train; each publishes one policy version."""
    groups_per_round: PositiveInt = 16
    """Problems per round (P), or `pairs`."""
    group_size: Annotated[int, Field(ge=2)] = 6
    """Completions per problem (G). At least 2, because the advantage compares them. With `pairs` it is 2."""
    inner_updates: PositiveInt = 12
    """Sweeps through each round's completions (mu), each of `num_minibatches` optimizer steps."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps of a sweep, each on another share of the round's completions, in their order (PPO, TraceRL).
    Groups stay whole if the loss compares their completions. A small round has at most one step per completion, or per
    group."""
    micro_batch_tokens: PositiveInt = 16384
    """Maximum tokens of one forward and backward on one worker, padding included. The update does not depend on it."""
    lr: PositiveFloat = 3e-6
    """Learning rate after warm-up."""
    final_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The learning rate decays linearly towards this share of `lr` at the end of the rounds; 1 is constant (d1)."""
    num_warmup_rounds: NonNegativeInt = 0
    """Rounds of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """AdamW's, of matrices and embeddings; norms and biases have none."""
    max_grad_norm: PositiveFloat = 0.2
    """Gradients are clipped to this global norm."""
    max_staleness: NonNegativeInt = 0
    """Policy lag: a round trains on completions at most this many policy versions old; 0 is exactly synchronous. Above
    0 samplers run while the learner trains. The importance ratio must then be to the policy that sampled
    (`objective.old: sampler`), or the loss be weighted by it (`objective.max_sampler_ratio`), or the objective be
    `trajectory_balance`, whose minimum does not depend on that policy."""
    algorithm: str = DEFAULT
    """A row of `docs/algorithms.md`: the defaults of `advantage`, `filters`, `estimator`, `objective`, `inner_updates`,
    `num_minibatches` and `group_size` where this section does not set them."""
    advantage: Advantage = Advantage.GROUP_MEAN
    """How rewards become advantages."""
    step_gain_coef: Coefficient = 0.0
    """Weight of a denoise step's own gain in its return: the reward minus that of the greedy completion of the state
    before the step, which is graded too (EGSPO-SA: 0.5). Needs `estimator.proposal: top_entropy` and takes up to
    `inner_updates` times `estimator.num_sampled` more gradings of each completion. 0: none, and every step has the
    completion's advantage."""
    filters: Filters = Filters()
    """Filters of the completions that are trained on."""
    estimator: EstimatorConfig = OneStepConfig()
    """The likelihood estimator: which corrupted canvases are run."""
    objective: ObjectiveConfig = ClippedRatioConfig()
    """The loss."""
    value: ValueConfig | None = None
    """The value model: a second network that predicts the return of each state, as the baseline of its step. The
    `advantage` is then the reward at the last step, and rewards of blocks are added at each block's last step. null: a
    completion's advantage is that of all its steps."""
    consistency: ConsistencyConfig | None = None
    """Self-distillation towards the better siblings of a rollout tree, `estimator.branches`. null: none."""
    imitation_coef: Coefficient = 0.0
    """Weight of SFT's denoising loss on the round's correct completions, at every update; 0 is off. Its random masks
    cover all states of a decode; `objective.nll_coef` is confined to the estimator's own canvases."""
    max_skipped_rounds: NonNegativeInt = 3
    """Consecutive rounds that may be skipped because their loss or gradient is not finite. Each counts as a failure,
    and its batch is kept in the run directory. One more ends the run."""
    reference_sync_rounds: NonNegativeInt = 0
    """Every so many rounds the KL reference becomes the current policy; 0 keeps the policy that RL started from. (d1
    configures a sync every 64 steps, which does nothing under LoRA.)"""

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, section: Any) -> Any:
        if not isinstance(section, dict):
            return section
        # A pair is a group of two, whatever group size the recipe has for completions.
        return with_algorithm(section) | ({"group_size": 2} if section.get("pairs") is not None else {})

    @model_validator(mode="after")
    def _fitting(self) -> LearnerConfig:
        if (why := self.objective.incompatibility(self.estimator, self.max_staleness)) is not None:
            raise ValueError(why)
        if self.value is not None and (why := self.value.incompatibility(self.estimator, self.objective)) is not None:
            raise ValueError(why)
        if self.value is not None and self.advantage in (Advantage.PART_Z, Advantage.ROUND_PART_Z):
            raise ValueError(
                f"value needs an advantage of the whole reward, such as group_z, not {self.advantage}: rewards "
                "of blocks would count twice"
            )
        if self.objective.tilts_by_reward and self.advantage is not Advantage.GROUP_MEAN:
            raise ValueError(
                f"objective {self.objective.name} tilts the reference by the reward: advantage must be group_mean, the "
                f"reward up to a constant of the group, not {self.advantage}"
            )
        return self

    @model_validator(mode="after")
    def _stored(self) -> LearnerConfig:
        if self.pairs is None:
            return self
        if not isinstance(self.objective, PreferenceConfig):
            raise ValueError(
                f"pairs is {self.pairs}, and objective {self.objective.name} learns from graded completions; take the "
                "objective preference (learner.algorithm=vrpo), or leave pairs out"
            )
        if self.filters != Filters():
            raise ValueError("filters select among graded completions, and pairs has none; leave one of them out")
        return self

    @model_validator(mode="after")
    def _steps_with_gains(self) -> LearnerConfig:
        if not self.step_gain_coef:
            return self
        needs = "step_gain_coef needs"
        estimator, objective = self.estimator, self.objective
        if estimator.name != "trajectory" or estimator.proposal != "top_entropy" or estimator.steps_per_segment != 1:
            raise ValueError(f"{needs} estimator trajectory with proposal: top_entropy and steps_per_segment: 1")
        if (estimator.slots, estimator.only, estimator.num_shown_steps) != ("denoised", "all", 0):
            raise ValueError(f"{needs} estimator.slots: denoised, only: all and num_shown_steps: 0")
        if objective.name != "clipped_ratio" or objective.level is Level.ROW:
            raise ValueError(f"{needs} objective clipped_ratio with level: token or part; steps have no others")
        if self.advantage is not Advantage.GROUP_MEAN:
            raise ValueError(f"{needs} advantage group_mean, and it is {self.advantage}")
        return self

    @model_validator(mode="after")
    def _predictions_of_steps(self) -> LearnerConfig:
        if not isinstance(self.estimator, PredictionsConfig):
            return self
        objective = self.objective
        if objective.name != "clipped_ratio" or objective.level is not Level.CANVAS_TOKEN:
            raise ValueError(
                "estimator predictions needs objective clipped_ratio with level: canvas_token; a slot has another "
                "token in each state, with the state's advantage"
            )
        if self.advantage is not Advantage.GROUP_Z:
            raise ValueError(
                f"estimator predictions needs advantage group_z, and it is {self.advantage}; the rewards of each step "
                "are normalised over the group"
            )
        return self

    @model_validator(mode="after")
    def _tree(self) -> LearnerConfig:
        if not self.branches:
            if self.consistency is not None:
                raise ValueError("consistency compares the siblings of a rollout tree: set estimator.branches too")
            return self
        if self.objective.name != "clipped_ratio" or self.objective.level is Level.ROW:
            raise ValueError(
                "estimator.branches needs objective clipped_ratio with level: token or part, whose advantages may "
                "differ by node"
            )
        if self.objective.normalize_by in (Normalize.ROW, Normalize.ROW_SUM):
            raise ValueError(
                f"objective.normalize_by is {self.objective.normalize_by}, and estimator.branches scores what "
                "completions share with one of them alone; take part, round or group"
            )
        if self.filters.first_correct:
            raise ValueError("filters.first_correct keeps one completion, and estimator.branches compares several")
        if self.value is not None:
            raise ValueError(
                "estimator.branches gives each node of a tree an advantage and value gives each step one; use only one "
                "of them"
            )
        if self.advantage not in _OF_WHOLE_REWARDS:
            raise ValueError(
                f"estimator.branches compares the mean rewards of siblings: advantage must be "
                f"{', '.join(_OF_WHOLE_REWARDS[:-1])} or {_OF_WHOLE_REWARDS[-1]}, not {self.advantage}"
            )
        if self.group_size != math.prod(self.branches):
            raise ValueError(
                f"estimator.branches {' x '.join(map(str, self.branches))} make {math.prod(self.branches)} completions "
                f"of a problem, and group_size is {self.group_size}; set group_size to {math.prod(self.branches)}"
            )
        return self

    @model_validator(mode="after")
    def _workers(self) -> LearnerConfig:
        if self.min_workers is not None and self.min_workers > self.num_workers:
            raise ValueError(
                f"min_workers is {self.min_workers} and num_workers is {self.num_workers}; take at most as many"
            )
        return self

    def incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return why this configuration cannot learn from completions of such a sampler; None if it can."""
        parts = [self.objective.sampler_incompatibility, self.filters.incompatibility, self.estimator.incompatibility]
        parts += [] if self.value is None else [self.value.sampler_incompatibility]
        if why := next((why for incompatibility in parts if (why := incompatibility(sampler)) is not None), None):
            return why
        if self.step_gain_coef and not sampler.predicts_canvas:
            return (
                f"step_gain_coef is {self.step_gain_coef:g} and needs samplers whose steps predict the whole canvas: a "
                "bidirectional policy, and rollout.sampling.cache none; take them, or learner.step_gain_coef=0"
            )
        return self._idle_update(sampler)

    @property
    def branches(self) -> tuple[int, ...]:
        """Children of a node at each level of a problem's rollout tree; empty if its completions share nothing."""
        return (self.estimator.branches or ()) if self.estimator.name == "trajectory" else ()

    def num_step_answers(self, num_steps: int) -> int:
        """Return how many of a completion's `num_steps` denoise steps have their answers graded, at most."""
        if self.samples_step_answers:
            return num_steps
        if not self.step_gain_coef or self.estimator.name != "trajectory":
            return 0
        return self.inner_updates * (self.estimator.num_sampled or 0)

    @property
    def samples_step_answers(self) -> bool:
        """Whether these answers are what the steps sampled, and trained on, and not greedy completions."""
        return isinstance(self.estimator, PredictionsConfig)

    def _idle_update(self, sampler: SamplerFacts) -> str | None:
        """Return that the last inner update would have no denoise step left to train on; None if it has one."""
        if self.estimator.name == "step_states":
            num_taken, num_steps, of_what = 1, num_states(sampler), "at least 1 other denoise step of a completion"
        elif self.estimator.name == "trajectory" and self.estimator.proposal == "top_entropy":
            num_taken = self.estimator.num_sampled or 0
            num_steps = sampler.max_denoise_steps - self.estimator.num_shown_steps
            of_what = f"{num_taken} other denoise steps of a completion (estimator.num_sampled)"
        else:
            return None
        if (self.inner_updates - 1) * num_taken < num_steps:
            return None
        return (
            f"inner_updates is {self.inner_updates}, each takes {of_what}, and at most {num_steps} are scored: nothing "
            f"would be left for the last one; take learner.inner_updates={-(-num_steps // num_taken)}"
        )

    def progress_at(self, round_index: int) -> float:
        """Return the share of the rounds that come before a round."""
        return min(1.0, round_index / max(1, self.num_rounds))

    def lr_at(self, round_index: int) -> float:
        """Return the learning rate of a round."""
        warmup = min(1.0, (round_index + 1) / (self.num_warmup_rounds + 1))
        return self.lr * warmup * (1.0 - (1.0 - self.final_lr_fraction) * round_index / max(1, self.num_rounds))
