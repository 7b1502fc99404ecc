"""Run specification: a run's config, directory and stages, which all of its actors share."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from actors.run_config import RunConfig
from actors.run_log import CHECKPOINTS
from learner.estimators import SamplerFacts
from learner.model.checkpoint_files import max_float32_bytes
from learner.model.lora_config import LoraConfig
from learner.parallel.timeouts import COLLECTIVE_TIMEOUT_S, transfer_timeout_s
from rollout.request import Cache, SamplingParams, Schedule


class Phase(StrEnum):
    """The stages of a run, in order."""

    UNTRAINED = "untrained"
    SFT = "sft"
    RL = "rl"
    CONTROL = "control"


class RunSpec(RunConfig):
    """A run's config, directory and stages. Paths are absolute."""

    run_dir: Path
    """The run directory, accessible to every machine of the run."""
    phases: tuple[Phase, ...]
    """The stages to run."""

    @property
    def checkpoints_dir(self) -> Path:
        """Directory of the run's checkpoints."""
        return self.run_dir / CHECKPOINTS

    @property
    def initial_checkpoint(self) -> Path:
        """Checkpoint of policy version 0, with the tokenizer that all versions share."""
        return self.checkpoints_dir / "initial"

    @property
    def collective_timeout_s(self) -> float:
        """Timeout of a rank in one collective: `COLLECTIVE_TIMEOUT_S`, plus the time to read a checkpoint twice, for
        verifying and for loading."""
        return transfer_timeout_s(COLLECTIVE_TIMEOUT_S, 2 * max_float32_bytes(self.initial_checkpoint))

    @property
    def sampling_timeout_s(self) -> float:
        """Timeout of one work unit: `rollout.timeout_s`, plus the time for its weights to arrive."""
        return transfer_timeout_s(self.rollout.timeout_s, max_float32_bytes(self.initial_checkpoint))

    def with_micro_batches(self, tokens: Mapping[str, int]) -> RunSpec:
        """Return the spec with other micro-batch sizes, by recipe section (`sft`, `learner`). The gradient stays the
        same."""
        sections = {
            name: getattr(self, name).model_copy(update={"micro_batch_tokens": size}) for name, size in tokens.items()
        }
        return self.model_copy(update=sections)

    def lora_of(self, phase: Phase) -> LoraConfig:
        """Return the adapter config of a stage: SFT and the control, which continues SFT, may have their own alpha."""
        alpha = None if phase is Phase.RL else self.sft.lora_alpha
        return self.model.lora if alpha is None else self.model.lora.model_copy(update={"alpha": alpha})


def sampler_facts(params: SamplingParams, *, is_block_causal: bool = False, is_fp8: bool = False) -> SamplerFacts:
    """Return what a learner must know about completions that are sampled with these parameters."""
    is_whole = params.top_p == 1 and params.top_k == 0 and not params.cfg_scale
    return SamplerFacts(
        temperature=params.temperature,
        block_length=params.block_length,
        num_blocks=params.num_blocks,
        max_denoise_steps=_max_denoise_steps(params, is_block_causal=is_block_causal),
        forbidden_ids=params.forbidden_ids,
        has_reproducible_logps=is_whole and params.cache is Cache.NONE,
        has_exact_logps=params.logp_exact,
        is_fp8=is_fp8,
        # The other schedules have no acceptance test, or one that the first slot always passes.
        has_fallback=params.threshold is not None or params.schedule is Schedule.FACTOR,
        has_varying_steps=not params.has_even_shares or params.edits,
        edits=params.edits,
        predicts_canvas=params.cache is Cache.NONE and not is_block_causal,
        is_block_causal=is_block_causal,
    )


def _max_denoise_steps(params: SamplingParams, *, is_block_causal: bool) -> int:
    if params.edits:
        # A step that begins with a masked slot fills at least one.
        return (params.block_length + params.max_post_steps) * (params.num_blocks + 1)
    has_shares = params.has_even_shares or (
        params.schedule is Schedule.THRESHOLD and params.steps_per_block is not None
    )
    if not has_shares:
        # At least one slot per step.
        return params.max_slots(is_block_causal=is_block_causal)
    if params.steps_per_block is None and not is_block_causal:
        return params.num_denoise_steps
    # A block-causal policy's first block may begin in the prompt, which adds one block.
    return params.num_block_steps * (params.num_blocks + is_block_causal)
