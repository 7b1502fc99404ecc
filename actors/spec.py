"""A recipe's run at its place, with its stages: what all of its actors share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from actors.run_config import RunConfig
from actors.run_log import CHECKPOINTS
from learner.estimators import SamplerFacts
from rollout.request import Cache, SamplingParams, Schedule


class Phase(StrEnum):
    """The stages of a run, in order."""

    UNTRAINED = "untrained"
    SFT = "sft"
    RL = "rl"
    CONTROL = "control"


class RunSpec(RunConfig):
    """A run's config, where the run lies and which stages it has. Paths are absolute."""

    run_dir: Path
    """Every machine of the run sees it."""
    phases: tuple[Phase, ...]
    """The stages to run."""

    @property
    def checkpoints_dir(self) -> Path:
        """Where the run's checkpoints lie."""
        return self.run_dir / CHECKPOINTS

    @property
    def initial_checkpoint(self) -> Path:
        """Policy version 0, with the tokenizer that all versions share."""
        return self.checkpoints_dir / "initial"

    def with_micro_batches(self, tokens: int) -> RunSpec:
        """The same with other micro-batches in the rounds: of another size, and of the same gradient."""
        learner = self.learner.model_copy(update={"micro_batch_tokens": tokens})
        return self.model_copy(update={"learner": learner})


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
