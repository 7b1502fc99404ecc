"""Run configuration: the part of a recipe that a run's actors need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from actors.resources import OBJECT_STORE, GpuSection, PlacementSection, WeightTransport
from learner.config import LearnerConfig
from learner.model.config import TransformerConfig
from learner.model.lora_config import LoraConfig
from learner.parallel.sharding_config import ShardingConfig
from learner.sft.config import SftConfig
from rewards import RewardConfig, TaskConfig
from rewards.terms.endpoint import RemoteTermConfig
from rewards.terms.judge.config import JudgeConfig
from rewards.terms.shaping import LengthPenaltyConfig
from rewards.terms.term import TermConfig
from rollout.config import EvaluationConfig, RolloutConfig
from rollout.request import SamplingParams

STRICT = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
"""Config of every section; unknown fields are rejected."""


class ModelSection(BaseModel):
    """The policy: made from scratch with the shape below, or loaded from a checkpoint."""

    model_config = STRICT

    checkpoint: Path | None = None
    """The Hugging Face checkpoint or peft adapter to start from: a directory, a run's directory (its newest
    checkpoint), or a hub id `org/name[@revision]`. The checkpoint's shape replaces the one below. The run refers to its
    weight files and does not copy them: they must stay where they are, accessible to every machine of the run."""
    d_model: PositiveInt = 128
    """Width of the residual stream."""
    num_layers: PositiveInt = 4
    """Transformer blocks."""
    num_heads: PositiveInt = 4
    """Attention heads."""
    mlp_hidden_size: PositiveInt = 384
    """Inner width of the SwiGLU."""
    init_scale: PositiveFloat = 1.0
    """Scale of the initial weights. Smaller ones learn more slowly, and generalise better where the answer must be
    composed (digit sums: from nothing to a third of the held-out problems)."""
    block_length: PositiveInt | None = None
    """Block length, in slots, of a block-causal policy (SDAR's architecture): a slot attends to its own block and all
    blocks before it. Absent: every slot attends to every other (LLaDA's architecture)."""
    vocab_size: Annotated[int, Field(ge=288)] = 320
    """Maximum vocabulary size of the tokenizer, which is trained on the task's texts."""
    lora: LoraConfig = LoraConfig()
    """Which weights both stages train: all, or a LoRA adapter."""

    def shape(
        self, vocab_size: int, max_sequence_length: int, *, mask_token_id: int, eos_token_id: int
    ) -> TransformerConfig:
        """Return the config of a policy made from scratch, for a given tokenizer and canvas length."""
        return TransformerConfig(
            family="llada" if self.block_length is None else "sdar",
            block_length=self.block_length,
            qk_norm=self.block_length is not None,
            vocab_size=vocab_size,
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            mlp_hidden_size=self.mlp_hidden_size,
            max_sequence_length=max_sequence_length,
            mask_token_id=mask_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=eos_token_id,
        )

    @model_validator(mode="after")
    def _heads(self) -> ModelSection:
        if self.d_model % self.num_heads or (self.d_model // self.num_heads) % 2:
            raise ValueError(
                f"num_heads {self.num_heads} does not split d_model {self.d_model} into heads of even width"
            )
        return self


class GraderSection(BaseModel):
    """The grader pool."""

    model_config = STRICT

    num_graders: PositiveInt = 1
    """Number of grader actors."""
    timeout_s: PositiveFloat = 60.0
    """Timeout for grading one batch of completions, in seconds, after which the batch is retried. Each program and
    mathematical comparison has its own limit (`task.sandbox.wall_s`), which is added to it."""


class ControlSection(BaseModel):
    """The control experiment: more SFT on the same labels, from the SFT checkpoint, for as long as the rounds took."""

    model_config = STRICT

    enabled: bool = True
    """Whether to run it after the rounds."""
    num_steps: NonNegativeInt = 0
    """Optimizer steps; 0: as many as fit into the seconds that the rounds took."""


class RunConfig(BaseModel):
    """Everything that determines what a run computes."""

    model_config = STRICT

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
    """The run's name: its directory below `runs_dir`, the prefix of its Ray actors' names, and its job id."""
    seed: NonNegativeInt = 0
    """Seed of every random draw of the run."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of samplers and learner workers: `cpu`, or `cuda` with one GPU for each of them, or as `gpus` says."""
    gpus: GpuSection = GpuSection()
    """Shares of GPUs."""
    placement: PlacementSection = PlacementSection()
    """Placement on the machines of a cluster."""
    weight_transport: WeightTransport = OBJECT_STORE
    """Weight sync without LoRA: through Ray's object store, where the weights outlive the learner; or from the
    learner's memory by Ray Direct Transport, over `nixl` (needs the package) or `cuda_ipc` (on one GPU)."""
    task: TaskConfig
    """The task to learn."""
    reward: RewardConfig = RewardConfig()
    """The reward of the rounds."""
    num_train_problems: PositiveInt = 2000
    """Training problems that the rounds sample from, without labels; SFT's labels are those of the first ones."""
    model: ModelSection = ModelSection()
    """The policy."""
    sft: SftConfig
    """Stage 1: SFT."""
    rollout: RolloutConfig = RolloutConfig()
    """The sampler pool."""
    grading: GraderSection = GraderSection()
    """The grader pool."""
    learner: LearnerConfig
    """Stage 2: the rounds of RL."""
    sharding: ShardingConfig = ShardingConfig()
    """Sharding of the policy over the learner's workers."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out accuracy."""
    control: ControlSection = ControlSection()
    """The control experiment: SFT for the seconds that the rounds took."""
    checkpoint_every_rounds: NonNegativeInt = 0
    """Rounds between checkpoints. 0: checkpoints only by time, at evaluated rounds, and at the ends of the stages."""
    checkpoint_every_s: NonNegativeFloat = 120.0
    """Seconds between checkpoints in SFT, the rounds and the control, in addition: the most that a crash can lose.
    Writing takes at most a twentieth of the time: if a checkpoint is slow to write, they are further apart. 0: none by
    time."""
    num_checkpoints_kept: PositiveInt = 3
    """Number of newest checkpoints to keep, besides those that end a stage, the best by validation (or, without, by
    held-out accuracy) and one that an operator has pinned."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project; needs the extra `d1[wandb]`. WANDB_MODE=offline keeps the data
    local."""

    @property
    def canvas_tokens(self) -> int:
        """The longest canvas of the rounds, in tokens."""
        is_block_causal = self.model.block_length is not None
        return self.rollout.max_prompt_tokens + self.rollout.sampling.max_slots(is_block_causal=is_block_causal)

    @property
    def may_hold_base_in_bfloat16(self) -> bool:
        """Whether the learner may hold frozen weights in bfloat16, if their checkpoint is: it computes in bfloat16
        anyway."""
        lora = self.model.lora
        return lora.rank > 0 and lora.base_weights == "full" and self.sharding.compute_dtype == "bfloat16"

    @property
    def groups_per_work_unit(self) -> int:
        """Groups in a work unit."""
        return self.groups_per_work_unit_for(self.rollout.num_samplers)

    def groups_per_work_unit_for(self, num_samplers: int) -> int:
        """Return the groups in a work unit for `num_samplers`: at most a sampler's batch, and few enough for each
        sampler to have its share of a round."""
        return min(self.max_groups_per_work_unit, -(-self.learner.groups_per_round // num_samplers))

    @property
    def max_groups_per_work_unit(self) -> int:
        """Maximum groups in a work unit: a sampler's batch."""
        return max(1, self.rollout.batch_size // self.learner.group_size)

    @property
    def max_requests_per_work_unit(self) -> int:
        """Completions of the largest work unit, of a round or of an evaluation."""
        return max(self.rollout.batch_size, self.learner.group_size)

    @property
    def grading_timeout_s(self) -> float:
        """Timeout for grading one work unit: `grading.timeout_s`, plus the time limit of each text."""
        num_texts = self.max_requests_per_work_unit * (1 + self._num_step_answers)
        return self.grading.timeout_s + num_texts * self.task.max_grading_s

    @property
    def _num_step_answers(self) -> int:
        sampling = self.rollout.sampling
        return self.learner.num_step_answers(sampling.fixed_num_steps or sampling.gen_length)

    @property
    def max_groups_per_round(self) -> int:
        """Maximum groups that a round may sample, including replacements."""
        return int(self.learner.groups_per_round * self.rollout.max_oversampling)

    @property
    def sampled_groups_per_round(self) -> int:
        """Groups that a round samples, before any is replaced; none if it trains on stored pairs."""
        return self.learner.groups_per_round if self.learner.pairs is None else 0

    @property
    def work_units_per_round(self) -> int:
        """Work units of a round, before any group is replaced."""
        return -(-self.sampled_groups_per_round // self.groups_per_work_unit)

    @property
    def sft_tokens(self) -> int:
        """The longest canvas of SFT, in tokens."""
        of_data = None if self.sft.data is None else self.sft.max_tokens
        return of_data or self.canvas_tokens

    @property
    def sft_micro_batch_tokens(self) -> int:
        """Maximum tokens of an SFT micro-batch on one worker: at least one row, at most the worker's share of a
        batch."""
        return self.sft_micro_batch_tokens_for(self.learner.num_workers)

    def sft_micro_batch_tokens_for(self, num_workers: int) -> int:
        """Return the same for `num_workers` learner workers."""
        whole = -(-self.sft.batch_size // num_workers) * self.sft_tokens
        return min(whole, max(self.sft.micro_batch_tokens or whole, self.sft_tokens))

    @property
    def learner_sizes(self) -> list[int]:
        """Numbers of workers that the learner may train with, the largest first."""
        num_workers, of_copy = self.learner.num_workers, self.sharding.workers_per_copy or 1
        least = self.learner.min_workers or num_workers
        return [size for size in range(num_workers, least - 1, -1) if size % of_copy == 0]

    @property
    def longest_canvas(self) -> int:
        """The longest canvas of all stages, in tokens."""
        return max(self.canvas_tokens, self.sft_tokens)

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.sft.data is None and self.sft.num_steps:
            self._check_labels()
        if self.max_groups_per_round > self.num_train_problems and self.sampled_groups_per_round:
            oversampling = self.rollout.max_oversampling
            times = f" times rollout.max_oversampling {oversampling:g}" if oversampling > 1 else ""
            raise ValueError(
                f"learner.groups_per_round {self.learner.groups_per_round}{times} "
                f"exceeds num_train_problems {self.num_train_problems}: a round asks each problem once"
            )
        if self.evaluation.num_validation and not self.task.validation_fraction:
            raise ValueError(
                f"evaluation.num_validation is {self.evaluation.num_validation}, and task.validation_fraction 0 keeps "
                "no problem for validation; take a fraction such as 0.1"
            )
        try:
            self.evaluation.params(self.rollout.sampling)
        except ValueError as error:
            raise ValueError(f"evaluation.{error}") from None
        if self.model.lora.rank and self.learner.reference_sync_rounds:
            raise ValueError(
                f"learner.reference_sync_rounds {self.learner.reference_sync_rounds} moves the KL reference, which "
                "with model.lora.rank is the policy without its adapter and stays; take 0 for one of the two"
            )
        if self.learner.objective.name == "distillation" and self.rollout.max_oversampling > 1:
            raise ValueError(
                f"rollout.max_oversampling is {self.rollout.max_oversampling:g} and replaces groups whose rewards are "
                f"all equal, and learner.objective {self.learner.objective.name} looks at no reward: take 1"
            )
        if self.control.enabled and self.sft.config_error is not None:
            raise ValueError(
                f"sft.{self.sft.config_error}; the control trains on them too, unless control.enabled is false"
            )
        if self.learner.num_workers % (self.sharding.workers_per_copy or 1):
            raise ValueError(
                f"sharding.workers_per_copy {self.sharding.workers_per_copy} does not divide learner.num_workers "
                f"{self.learner.num_workers}, and every copy has as many; take another, or 0 for one copy on all"
            )
        if self.sharding.cpu_offload and self.device == "cpu":
            raise ValueError("sharding.cpu_offload is for device cuda; with device cpu everything is in main memory")
        return self

    @model_validator(mode="after")
    def _predictions(self) -> RunConfig:
        if self.learner.samples_step_answers and len({params.fixed_num_steps for params in self.rollout.params}) > 1:
            raise ValueError(
                "rollout.schedules have different numbers of denoise steps, and learner.estimator predictions compares "
                "completions step by step: give them all the same number"
            )
        return self

    @model_validator(mode="after")
    def _value_model(self) -> RunConfig:
        if self.learner.value is not None and self.model.lora.base_weights == "nf4":
            raise ValueError(
                "learner.value is a second network with a copy of the policy's weights, and 4-bit weights cannot be "
                "copied: take model.lora.base_weights=full"
            )
        return self

    @model_validator(mode="after")
    def _gpus(self) -> RunConfig:
        gpus, num_workers, num_samplers = self.gpus, self.learner.num_workers, self.rollout.num_samplers
        if self.device == "cpu" and gpus != GpuSection():
            raise ValueError("gpus is for device cuda; with device cpu nothing has a GPU")
        if gpus.learner < 1 < num_workers:
            raise ValueError(
                f"gpus.learner {gpus.learner:g} is a share for one worker, and learner.num_workers is {num_workers}: "
                "two could be given one GPU, which NCCL refuses; take 1 for one of them"
            )
        if gpus.colocate and num_samplers != num_workers:
            raise ValueError(
                f"gpus.colocate has a sampler and a learner worker take turns on each GPU, and rollout.num_samplers is "
                f"{num_samplers}, learner.num_workers {num_workers}; take the same number"
            )
        if gpus.colocate and len(self.learner_sizes) > 1:
            raise ValueError(
                f"gpus.colocate needs as many learner workers as samplers, and learner.min_workers "
                f"{self.learner.min_workers} allows fewer; leave it out"
            )
        if gpus.colocate and self.learner.max_staleness:
            raise ValueError(
                f"gpus.colocate offloads the samplers while the learner trains, and learner.max_staleness "
                f"{self.learner.max_staleness} lets them sample meanwhile; take learner.max_staleness=0 or "
                "gpus.colocate=false"
            )
        return self

    @model_validator(mode="after")
    def _samples(self) -> RunConfig:
        if self.sft.num_samples and self.sharding.cpu_offload:
            raise ValueError(
                f"sft.num_samples is {self.sft.num_samples}, and with sharding.cpu_offload the learner has no policy "
                "on its GPU to sample from; take sft.num_samples=0 or sharding.cpu_offload=false"
            )
        return self

    @model_validator(mode="after")
    def _terms(self) -> RunConfig:
        for name, term in self.reward.terms.items():
            if refusal := self._term_refusal(term):
                raise ValueError(f"reward.terms.{name}{refusal}")
        servers: dict[str, tuple[str, object]] = {}
        for name, term in self.reward.terms.items():
            if isinstance(term, JudgeConfig) and term.vllm is not None:
                other, served = servers.setdefault(term.base_url, (name, (term.model, term.vllm)))
                if served != (term.model, term.vllm):
                    raise ValueError(
                        f"reward.terms.{name} and reward.terms.{other} start different servers at {term.base_url}; "
                        "take another port for one of them"
                    )
        return self

    def _term_refusal(self, term: TermConfig) -> str | None:
        """Return why a reward term does not fit the rest of the config; None if it does."""
        gen_length, limit_s = self.rollout.sampling.gen_length, self.grading.timeout_s
        count = self.rollout.batch_size * (1 + self._num_step_answers)
        texts = "completions and step answers" if self._num_step_answers else "completions"
        if isinstance(term, LengthPenaltyConfig) and term.buffer_tokens > gen_length:
            return f".buffer_tokens {term.buffer_tokens} exceeds rollout.sampling.gen_length {gen_length}"
        if isinstance(term, RemoteTermConfig) and term.total_timeout_s > limit_s:
            return (
                f" may wait {term.total_timeout_s:g} s for a server that does not answer, and a grader is restarted "
                f"after grading.timeout_s {limit_s:g}; take a larger one, or a smaller timeout_s or num_tries"
            )
        rate = term.requests_per_minute if isinstance(term, JudgeConfig) else None
        if rate is not None and count * 60 / rate > limit_s:
            return (
                f".requests_per_minute {rate:g} needs {count * 60 / rate:g} s for the {count} {texts} of "
                f"rollout.batch_size, and a grader is restarted after grading.timeout_s {limit_s:g}; take a larger one"
            )
        return None

    def _check_labels(self) -> None:
        """Raise ValueError unless the task has enough problems for SFT's examples."""
        if (self.sft.num_labels or 0) > self.num_train_problems:
            raise ValueError(
                f"sft.num_labels {self.sft.num_labels} exceeds num_train_problems {self.num_train_problems}, "
                "of which the labels are the first"
            )
        kind, field, most = self.evaluation.selection_problems
        if self.sft.num_eval > most:
            raise ValueError(
                f"sft.num_eval {self.sft.num_eval} exceeds evaluation.{field} {most}, the {kind} problems, of which "
                "they are the first"
            )

    @property
    def evaluated_params(self) -> tuple[SamplingParams, ...]:
        """Sampling parameters of the evaluations; the service uses the first."""
        return self.evaluation.params(self.rollout.sampling)
