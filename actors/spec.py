"""What one run is made of, as the actors need it: a recipe with its paths resolved."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from actors.run_log import CHECKPOINTS
from learner.config import LearnerConfig
from learner.estimators import SamplerFacts
from learner.model.lora import LoraConfig
from learner.parallel.sharding_config import ShardingConfig
from learner.sft.sft import SftConfig
from rewards import RewardConfig, TaskConfig
from rollout.config import EvaluationConfig, RolloutConfig
from rollout.request import Cache, SamplingParams, Schedule


class Phase(StrEnum):
    """The stages of a run, in order."""

    UNTRAINED = "untrained"
    SFT = "sft"
    RL = "rl"
    CONTROL = "control"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """Everything that the actors of a run share."""

    name: str
    """The run's name."""
    run_dir: Path
    """Absolute; every machine of the run sees it."""
    seed: int
    """Keys every random draw."""
    device: str
    """`cpu` or `cuda`: where samplers and learners compute."""
    task: TaskConfig
    """What is learned."""
    reward: RewardConfig
    """What the rounds reward; its paths are absolute."""
    num_train_problems: int
    """Problems that the rounds draw from; SFT's labels are the first of them."""
    phases: tuple[Phase, ...]
    """The stages to run."""
    sft: SftConfig
    """Stage 1."""
    rollout: RolloutConfig
    """The sampler pool."""
    learner: LearnerConfig
    """Stage 2."""
    lora: LoraConfig
    """What of the policy is trained."""
    sharding: ShardingConfig
    """How the learner's workers hold it."""
    evaluation: EvaluationConfig
    """Held-out accuracy."""
    grading_timeout_s: float
    """Longest time to grade one portion, in seconds."""
    control_steps: int
    """Optimizer steps of the control; 0: as many as fit into the seconds that the rounds took."""
    checkpoint_every_rounds: int
    """Rounds between checkpoints; 0: only by time, and at the ends of the stages."""
    checkpoint_every_s: float
    """Seconds between checkpoints; 0: none by time."""
    num_checkpoints_kept: int
    """The newest checkpoints that are kept beside the best and those that end a stage."""
    wandb_project: str | None
    """The Weights & Biases project that the numbers also go to."""

    @property
    def checkpoints_dir(self) -> Path:
        """Where the run's checkpoints lie."""
        return self.run_dir / CHECKPOINTS

    @property
    def sft_tokens(self) -> int:
        """The longest canvas of SFT, in tokens."""
        return self.sft.max_tokens or self.rollout.max_prompt_tokens + self.rollout.sampling.gen_length

    @property
    def initial_checkpoint(self) -> Path:
        """Policy version 0, with the tokenizer that all versions share."""
        return self.checkpoints_dir / "initial"


def sampler_facts(params: SamplingParams) -> SamplerFacts:
    """What a learner must know of completions that are sampled like this."""
    is_whole = params.top_p == 1 and params.top_k == 0 and not params.cfg_scale
    return SamplerFacts(
        temperature=params.temperature,
        block_length=params.block_length,
        # The other schedules commit one slot a step at least.
        most_steps=params.num_denoise_steps if params.is_by_shares else params.gen_length,
        forbidden_ids=params.forbidden_ids,
        records_law=is_whole and params.cache is Cache.NONE and params.logp_exact,
        # The other schedules have no test, or one that the first slot always passes.
        has_fallback=params.threshold is not None or params.schedule is Schedule.FACTOR,
        has_varying_steps=not params.is_by_shares,
    )
