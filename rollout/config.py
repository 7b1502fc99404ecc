"""How many samplers there are and what they do."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from learner.model.deferred import torch
from rollout.request import SamplingParams
from rollout.schedule_config import ScheduleConfig, with_schedules


class EngineConfig(BaseModel):
    """How a sampler computes. None of it changes what is sampled, but for the last bits of a logit."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    num_slots: PositiveInt = 64
    """Completions that are denoised at a time: a row that is done leaves, and one that waits takes its place."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations; logits, probabilities and draws are float32 in any case."""
    steps_per_sync: PositiveInt = 1
    """Denoise steps between two looks at which rows are done: more keep a GPU busy, and run rows that are done along.
    With a cache it is 1."""
    attention: Literal["sdpa", "flex"] = "sdpa"
    """How rows of unequal length share a batch: `sdpa` masks their padding, `flex` (FlexAttention) skips it. `flex` is
    made for `compile` on a GPU."""
    compile: bool = False
    """Compile the policy (torch.compile; on a GPU with CUDA graphs). It takes minutes at the start, for each shape."""
    block_cache: bool = True
    """Remember the keys and values of finished blocks where the policy is block-causal: exact, and a step then runs its
    block alone. Off, every step runs the whole canvas up to its block. A bidirectional policy has `sampling.cache`."""
    static_shapes: bool = False
    """Predict every slot of a block instead of the masked ones: nothing waits for the device within a step. Always so
    on a GPU."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch names it."""
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32


class RolloutConfig(BaseModel):
    """The sampler pool and how it samples training completions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    num_samplers: PositiveInt = 2
    """Sampler actors. Each holds a whole policy and computes on a GPU of its own, or on one thread of a CPU."""
    batch_size: PositiveInt = 64
    """Completions that a sampler is given at once, at most: whole groups, and no more than share a round out among
    `num_samplers`. Both are part of what a run's numbers depend on: the last bits of a logit change with the batch."""
    engine: EngineConfig = EngineConfig()
    """How a sampler computes."""
    sampling: SamplingParams = SamplingParams()
    """How training completions are denoised; evaluation does the same at temperature 0."""
    schedules: tuple[ScheduleConfig, ...] | None = None
    """Schedules in place of that of `sampling`, each a section such as `num_denoise_steps: 9` or `threshold: 0.9`: the
    seed draws one for each group, so that the states of all of them are trained. Absent: every group is denoised as
    `sampling` says."""
    max_oversampling: Annotated[float, Field(ge=1)] = 1.0
    """Above 1, a round replaces groups that teach nothing by others, and asks up to so many times its groups (DAPO's
    dynamic sampling; `docs/algorithms.md`). Those are groups whose rewards are all equal, that `learner.filters`'
    accuracies leave out, or that failed. 1: none is replaced."""
    curriculum: Annotated[int, Field(ge=1, le=64)] = 1
    """Above 1, a round chooses its problems among so many times as many: by chance, in proportion to p (1 - p) if p is
    how often one was solved so far, and those that were never asked before all others (`docs/algorithms.md`). 1: they
    come in their order."""
    overlong_prompts: Literal["drop", "truncate_left"] = "drop"
    """Prompts above `max_prompt_tokens`: `drop` trains on none of them and counts them, and evaluations ask them whole;
    `truncate_left` keeps the last tokens everywhere, as d1 does, which cuts off the instruction."""
    max_prompt_tokens: PositiveInt = 200
    """Longest prompt of training (d1: 200)."""
    timeout_s: PositiveFloat = 600.0
    """Longest time for one batch of completions, in seconds, beside what new weights take to arrive at 50 MB/s; then it
    is tried on another sampler."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Tries of one batch before its groups count as failed."""

    @model_validator(mode="after")
    def _fitting(self) -> RolloutConfig:
        with_schedules(self.sampling, self.schedules)
        return self

    @property
    def params(self) -> tuple[SamplingParams, ...]:
        """What a group's parameters are drawn from."""
        return with_schedules(self.sampling, self.schedules)


class EvaluationConfig(BaseModel):
    """Held-out accuracy at temperature 0."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    num_problems: PositiveInt = 500
    """Held-out problems of each evaluation. Those whose prompts leave no room for a completion count as wrong."""
    num_validation: NonNegativeInt = 0
    """Validation problems, of `task.validation_fraction`: with them the evaluations between the rounds, SFT's loss and
    the choice of the best checkpoint are on these, and the held-out problems are asked only at the ends of the stages.
    0: there are none, the evaluations between the rounds ask the held-out problems, and no checkpoint is `best`."""
    every_rounds: NonNegativeInt = 0
    """Evaluate also after every so many rounds, beside the next one, and write a checkpoint there; 0 does so only at
    the ends of the stages."""
    schedules: tuple[ScheduleConfig, ...] | None = None
    """Schedules in place of that of `rollout.sampling`, each a section as in `rollout.schedules`. The accuracy at the
    first is what a policy is compared and announced by, and what the service answers at; what SFT, the rounds and the
    control end with is evaluated at the others too."""

    @property
    def to_choose_by(self) -> tuple[str, str, int]:
        """What may be looked at before a run's end: which problems, the field that says how many, and how many."""
        if self.num_validation:
            return "validation", "num_validation", self.num_validation
        return "held-out", "num_problems", self.num_problems

    def params(self, sampling: SamplingParams) -> tuple[SamplingParams, ...]:
        """The parameters to evaluate at, the first the one that counts. Raises ValueError where one does not fit."""
        return with_schedules(sampling, self.schedules)
