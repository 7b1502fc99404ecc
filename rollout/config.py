"""Config of the samplers, of their engine, and of held-out evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from learner.model.config import TransformerConfig
from learner.model.deferred import torch
from rollout.request import SamplingParams
from rollout.schedule_config import ScheduleConfig, with_schedules

_FP8_MULTIPLE = 16


class EngineConfig(BaseModel):
    """How a sampler computes. Apart from `fp8` and `dtype`, nothing here changes more of a logit than its last bits."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    num_slots: PositiveInt = 64
    """Completions denoised at a time. A finished one leaves, and a waiting one takes its slot (continuous batching)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and activations. Probabilities and sampling are float32 in any case."""
    fp8: bool = False
    """Compute the linear layers of the blocks in FP8 (e4m3, with a scale for each row of weights and activations), on
    GPUs of compute capability 8.9 or newer. The recorded log-probabilities are then those of the FP8 policy:
    with the estimator `trajectory`, set `learner.objective.max_sampler_ratio` (`docs/benchmarks.md`). Weights are held
    in `dtype` too."""
    steps_per_sync: PositiveInt = 1
    """Denoise steps between checks for finished rows. More keep a GPU busy, but also run finished rows. With a KV cache
    it is 1."""
    attention: Literal["sdpa", "flex"] = "sdpa"
    """How rows of unequal length share a batch: `sdpa` masks their padding, or runs whole canvases back to back where a
    GPU kernel can; `flex` (FlexAttention) skips it. `flex` is meant for `compile` on a GPU."""
    compile: Literal[False, True, "elementwise"] = False
    """Compile the policy (torch.compile; on a GPU with CUDA graphs). Takes minutes at the start, for each shape.
    `elementwise`: only its norms, rotary positions, SwiGLUs and FP8 rounding, each to one kernel, in seconds."""
    block_cache: bool = True
    """KV cache of finished blocks, for block-causal policies. It is exact, and most steps then run only their block.
    Off, every step runs the canvas up to its block. A bidirectional policy has `sampling.cache`."""
    static_shapes: bool = False
    """Predict every slot of a block instead of the masked ones, so that a step does not synchronize with the device.
    Always on with a GPU."""

    @property
    def compiles_policy(self) -> bool:
        """Whether the whole policy is compiled, for each shape of a batch."""
        return self.compile is True

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as a torch dtype."""
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    def incompatibility(self, policy: TransformerConfig) -> str | None:
        """Return an error message if a policy cannot compute so; None if it can."""
        if policy.moe is not None and self.compiles_policy and self.dtype == "float32":
            return "compile is true, and experts are compiled in bfloat16 only; take rollout.engine.dtype=bfloat16"
        if not self.fp8:
            return None
        if policy.moe is not None:
            return "fp8 is for linear layers, and this policy has experts: leave it out"
        for layer in range(policy.num_layers):
            for name, widths in policy.linear_layers(layer).items():
                if any(width % _FP8_MULTIPLE for width in widths):
                    return (
                        f"fp8 needs layers whose widths are multiples of {_FP8_MULTIPLE}, and {name} maps {widths[0]} "
                        f"to {widths[1]}: leave it out"
                    )
        return None


class RolloutConfig(BaseModel):
    """The sampler pool and how it samples training completions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    num_samplers: PositiveInt = 2
    """Sampler actors. Each holds a whole policy and computes on one GPU (or the share `gpus.sampler`), or on one CPU
    thread."""
    batch_size: PositiveInt = 64
    """Maximum completions that are sent to a sampler at once: whole groups, and no more than divide a round among
    `num_samplers`. A run's exact numbers depend on both: the last bits of a logit change with the batch."""
    engine: EngineConfig = EngineConfig()
    """How a sampler computes."""
    sampling: SamplingParams = SamplingParams()
    """How training completions are denoised. Evaluation does the same at temperature 0."""
    schedules: tuple[ScheduleConfig, ...] | None = None
    """Schedules that replace the one of `sampling`, each a section such as `num_denoise_steps: 9` or `threshold: 0.9`.
    The seed picks one for each group, so that the states of all of them are trained. Absent: every group uses
    `sampling`."""
    max_oversampling: Annotated[float, Field(ge=1)] = 1.0
    """Above 1, a round replaces uninformative groups, and samples up to this many times its groups (DAPO's dynamic
    sampling; `docs/algorithms.md`). A group is uninformative if its rewards are all equal, if the accuracies of
    `learner.filters` exclude it, or if it failed. 1: none is replaced."""
    curriculum: Annotated[int, Field(ge=1, le=64)] = 1
    """Above 1, a round samples its problems from this many times as many candidates, weighted by p (1 - p), where p
    estimates a problem's solve rate so far. Problems that were never sampled have the largest weight
    (`docs/algorithms.md`). 1: problems come in their order."""
    overlong_prompts: Literal["drop", "truncate_left"] = "drop"
    """Prompts above `max_prompt_tokens`. `drop` leaves them out of training and reports their number; evaluations use
    them whole. `truncate_left` keeps their last tokens in training and evaluation, as the published d1 does, which cuts
    off the instruction."""
    max_prompt_tokens: PositiveInt = 200
    """Longest training prompt (d1: 200)."""
    timeout_s: PositiveFloat = 600.0
    """Timeout of one batch of completions, in seconds, plus the time that new weights take to arrive at 50 MB/s. After
    it the sampler is restarted and the batch is tried again."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Attempts at one batch before its groups count as failed."""

    @model_validator(mode="after")
    def _fitting(self) -> RolloutConfig:
        with_schedules(self.sampling, self.schedules)
        return self

    @property
    def params(self) -> tuple[SamplingParams, ...]:
        """Sampling parameters of training: the seed picks one of them for each group."""
        return with_schedules(self.sampling, self.schedules)


class EvaluationConfig(BaseModel):
    """Held-out accuracy at temperature 0."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    num_problems: PositiveInt = 500
    """Held-out problems of each evaluation. Those whose prompts leave no room for a completion count as wrong."""
    num_validation: NonNegativeInt = 0
    """Validation problems, from `task.validation_fraction`. With them, evaluations between rounds, SFT's evaluation
    loss and the choice of the best checkpoint use these, and the held-out problems are used only at the end of each
    stage. 0: evaluations between rounds use the held-out problems, and no checkpoint is `best`."""
    every_rounds: NonNegativeInt = 0
    """Also evaluate after every so many rounds, concurrently with the next one, and write a checkpoint there. 0: only
    at the end of each stage."""
    schedules: tuple[ScheduleConfig, ...] | None = None
    """Schedules that replace the one of `rollout.sampling`, each a section as in `rollout.schedules`. Policies are
    compared and published by their accuracy at the first, which is also the service's default. The final policies of
    SFT, of the rounds and of the control are evaluated at the others too."""

    @property
    def selection_problems(self) -> tuple[str, str, int]:
        """Problems that decisions within a run are based on: their kind, the field with their number, the number."""
        if self.num_validation:
            return "validation", "num_validation", self.num_validation
        return "held-out", "num_problems", self.num_problems

    def params(self, sampling: SamplingParams) -> tuple[SamplingParams, ...]:
        """Return the parameters to evaluate at; the first is the one that policies are compared by.

        Raises ValueError if a schedule does not fit.
        """
        return with_schedules(sampling, self.schedules)
