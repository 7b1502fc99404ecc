"""Configuration of stage 1, masked supervised fine-tuning: a recipe's section `sft`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator


class SftConfig(BaseModel):
    """Stage 1: masked SFT on the task's demonstrations, or on a file of examples."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    data: Path | None = None
    """Examples: a file, a directory or a dataset of the hub, as `task.train_data`. The machine of the learner's rank 0
    must have it, and the driver's, which checks it. Rows have `messages`, or `prompt` and `completion`, or s1K's
    columns, or `text`; `.txt` and `.md` files are plain text. Absent: the task's own demonstrations."""
    num_labels: PositiveInt | None = None
    """Examples to train on: the first training problems, or the first of `data` (absent: all of `data`). More optimizer
    steps reuse the same examples under other masks."""
    num_steps: NonNegativeInt
    """Optimizer steps; 0 skips the stage."""
    batch_size: PositiveInt = 64
    """Examples of an optimizer step, over all workers."""
    micro_batch_tokens: PositiveInt | None = None
    """Maximum tokens of one forward and backward on one worker, padding included; a longer row runs alone. Absent: all
    of a worker's examples of the step at once. The update does not depend on it. If a GPU's memory runs out, the run
    halves it automatically."""
    max_tokens: PositiveInt | None = None
    """Longest example of `data`, prompt and completion together (d1: 4096), and the length of the chunks that plain
    text is cut into; absent: the canvas of the rollout."""
    overlong: Literal["drop", "truncate"] = "drop"
    """Treatment of examples of `data` above `max_tokens`: `drop` leaves them out; `truncate` keeps their first tokens,
    as d1 does, which cuts off the answer. Both are counted."""
    eos_padding: Literal["trained", "ignored"] = "trained"
    """Padding after the first end of text: `trained` fills the canvas with end of text and trains on it (d1), so that
    the policy can be sampled on a canvas that is longer than its answer; `ignored` ends the canvas there."""
    packing: bool = False
    """Put several short examples into one row, each with its own positions and attention: the same loss from fewer
    slots. Needs `eos_padding: ignored`."""
    num_eval: NonNegativeInt = 0
    """Held-out examples for the evaluation loss; 0: none. From `data` they are a fixed choice by prompt (more than this
    only if several share one), or chunks of plain texts that are held out whole. Otherwise they are the first
    validation problems, or the first held-out ones if there are none."""
    eval_every_steps: NonNegativeInt = 0
    """Also compute the evaluation loss after every so many steps; 0: only at the start and the end."""
    num_samples: NonNegativeInt = 0
    """Completions of held-out prompts to show with each evaluation loss, sampled by the learner at temperature 0 with
    the first schedule of the evaluation; 0: none. At most `num_eval`."""
    normalize_by: Literal["row", "slot"] = "row"
    """What the loss is a mean over. `row`: the examples, of each one's mean over its completion slots (LLaDA, d1).
    `slot`: all completion slots of the batch, so that long answers weigh more. The two differ if examples have
    different numbers of slots, as with `eos_padding: ignored`."""
    attention_annealing_steps: NonNegativeInt = 0
    """Optimizer steps over which attention opens, for a policy that was autoregressive: a slot sees the slots before
    it, and a share of those after it that grows linearly from 1 / steps to 1 (DiffuLLaMA). 0: open from the first step.
    The evaluation loss is always under open attention."""
    lora_alpha: PositiveInt | None = None
    """`model.lora.alpha` of the adapter that SFT and the control train (d1: 256); absent: that of the rounds."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate, reached after `num_warmup_steps`, then decaying linearly to a tenth."""
    num_warmup_steps: NonNegativeInt = 20
    """Steps of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's (d1's)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """AdamW's, of matrices and embeddings; norms and biases have none."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""

    @model_validator(mode="after")
    def _consistent(self) -> SftConfig:
        if self.packing and self.eos_padding == "trained":
            raise ValueError(
                "packing is true and eos_padding is trained, which leaves no example shorter than its canvas; "
                "take eos_padding: ignored, or leave packing out"
            )
        if self.num_samples > self.num_eval:
            raise ValueError(
                f"num_samples is {self.num_samples} and num_eval is {self.num_eval}: samples complete the prompts of "
                "held-out examples; take a larger num_eval, or fewer samples"
            )
        if self.attention_annealing_steps > self.num_steps > 0:
            raise ValueError(
                f"attention_annealing_steps is {self.attention_annealing_steps} and num_steps is {self.num_steps}: the "
                f"stage would end before attention is open; take at most {self.num_steps}"
            )
        if self.num_steps and self.config_error is not None:
            raise ValueError(self.config_error)
        return self

    @property
    def config_error(self) -> str | None:
        """Why the examples are not determined; None if they are. It does not apply to a stage that is skipped."""
        if self.data is not None:
            return None
        if self.num_labels is None:
            return "num_labels is missing; without data it is needed: how many problems to train on"
        if self.max_tokens is not None:
            return (
                f"max_tokens is {self.max_tokens} and data is missing; the canvas of the task's demonstrations is "
                "set by rollout.max_prompt_tokens and rollout.sampling.gen_length"
            )
        return None

    def lr_at(self, step: int, progress: float) -> float:
        """Return the learning rate of an optimizer step, at a `progress` of the stage between 0 and 1."""
        return self.lr * min(1.0, (step + 1) / (self.num_warmup_steps + 1)) * (1.0 - 0.9 * progress)
