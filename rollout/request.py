"""Request, sampling parameters and completion of the sampler: token ids, never text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from learner.model.config import TransformerConfig
from learner.seeds import fold
from rollout.canvas import Canvas
from rollout.field_error import FieldError
from rollout.grammar.canvas_grammar import CanvasGrammar, masked_canvas
from rollout.grammar.grammar import Grammar

MAX_SEED = 2**63 - 1
_MAX_INT32 = 2**31 - 1
MIN_TEMPERATURE = 1e-3
"""Smallest temperature above 0: logits divided by less overflow float32."""
_DRAW_KEY = 21


class Schedule(StrEnum):
    """Unmasking schedule: which masked slots of the block a step commits. At least one; ties go to the leftmost."""

    QUOTA = "quota"
    """The most confident ones, an even share in each of `num_denoise_steps` (LLaDA, arXiv 2502.09992, app. B)."""
    THRESHOLD = "threshold"
    """Those whose most probable token exceeds probability `threshold` (Fast-dLLM, arXiv 2505.22618, section 3.3)."""
    FACTOR = "factor"
    """The r most confident, as long as the r-th has probability at least 1 - `factor` / (r + 1) (the same section)."""
    ENTROPY_BOUND = "entropy_bound"
    """The least uncertain, as long as their entropies, without the largest, sum to at most `entropy_bound` nats
    (arXiv 2505.24857, section 3)."""
    RANDOM = "random"
    """Random ones, as many as under `quota` (LLaDA's random remasking)."""
    LEFT_TO_RIGHT = "left_to_right"
    """The leftmost ones, as many as under `quota`. With `threshold`: those above it, or the leftmost if none is."""


class SamplingOrder(StrEnum):
    """Whether slots are selected before or after their tokens are sampled. At temperature 0 both are the same."""

    SELECT_THEN_SAMPLE = "select_then_sample"
    """Select slots by their predictions, then sample a token for each: `commit_logp` is exact."""
    SAMPLE_THEN_SELECT = "sample_then_select"
    """Sample every slot, then select those whose sample is probable, as LLaDA and d1 do. Committed tokens are then more
    probable than samples are, and `commit_logp` is approximate."""


class Cache(StrEnum):
    """KV cache of a bidirectional policy: keys and values reused from earlier steps. All but `none` are approximate."""

    NONE = "none"
    """No cache: every step is a forward of the whole canvas."""
    PREFIX = "prefix"
    """Keys and values before the block (Fast-dLLM, section 3.2)."""
    DUAL = "dual"
    """Keys and values before and after the block (the same section)."""


SCHEDULE_PARAMETER = {
    Schedule.THRESHOLD: "threshold",
    Schedule.FACTOR: "factor",
    Schedule.ENTROPY_BOUND: "entropy_bound",
}
"""The parameter that implies a schedule when the schedule itself is left out."""
_EVEN_SHARES = (Schedule.QUOTA, Schedule.RANDOM, Schedule.LEFT_TO_RIGHT)


class SamplingParams(BaseModel):
    """Sampling parameters: how a completion is denoised, block by block, each in the order of a schedule."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    gen_length: PositiveInt = 256
    """Completion slots of the canvas, in tokens."""
    block_length: PositiveInt = 32
    """Slots denoised together; blocks are finished from left to right. Must divide `gen_length`, except in a
    block-causal policy with `steps_per_block` or a schedule that depends on probabilities."""
    num_denoise_steps: Annotated[int, Field(gt=0, le=_MAX_INT32)] = 128
    """Denoise steps of the whole completion; a multiple of the number of blocks. Each step commits an even share.
    Schedules that depend on probabilities take as many steps as they need."""
    steps_per_block: Annotated[int, Field(gt=0, le=_MAX_INT32)] | None = None
    """Denoise steps of each block, in place of `num_denoise_steps`. With `threshold`, a step then commits at least its
    share (`low_confidence_dynamic` of SDAR, arXiv 2510.06303, and LLaDA2) instead of at least one slot."""
    temperature: Annotated[float, Field(ge=0, le=1000)] = 0.9
    """Temperature of the softmax that a token is sampled from. 0 takes the most probable token; the smallest positive
    value is 0.001."""
    schedule: Schedule = Schedule.QUOTA
    """Which slots a step commits: `quota`, `threshold`, `factor`, `entropy_bound`, `random`, `left_to_right`. If it is
    left out, it is the one whose parameter is given, else `quota`."""
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """Probability of the most probable token above which a slot is committed. For `threshold` and `left_to_right`."""
    factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Larger values commit more slots at once. For `factor`."""
    entropy_bound: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """In nats; larger values commit more slots at once. For `entropy_bound`."""
    editing_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """Token editing (LLaDA2.1, arXiv 2602.08676): a step also replaces committed tokens of its block where another
    token is the most probable one, with more than this probability. For block-causal policies; absent: no editing."""
    max_post_steps: Annotated[int, Field(gt=0, le=_MAX_INT32)] = 16
    """With `editing_threshold`: maximum denoise steps of a block once none of its slots is masked. A step that writes
    nothing ends the block too."""
    drawing: SamplingOrder = SamplingOrder.SELECT_THEN_SAMPLE
    """`select_then_sample`, or `sample_then_select` as LLaDA and d1 do, whose log-probabilities are approximate."""
    cfg_scale: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Classifier-free guidance: logits move away from those of a masked prompt by this factor, at two forwards per step
    (LLaDA, section 2.4). 0: no guidance."""
    top_p: Annotated[float, Field(ge=1e-6, le=1)] = 1.0
    """Sample from the fewest most probable tokens that have this much probability together (nucleus sampling)."""
    top_k: Annotated[int, Field(ge=0, le=_MAX_INT32)] = 0
    """Sample from this many most probable tokens. 0: from all."""
    forbidden_ids: tuple[NonNegativeInt, ...] = ()
    """Ids that are never committed, besides the mask id."""
    stop_ids: Annotated[tuple[NonNegativeInt, ...], Field(max_length=256)] | None = None
    """Ids that end a completion, by default the policy's end of text; an empty list fills the whole canvas."""
    cache: Cache = Cache.NONE
    """KV cache: `none` is exact. `prefix` and `dual` reuse keys and values inside a block, and are approximate."""
    cache_refresh_steps: NonNegativeInt = 0
    """With a cache: a full forward after so many steps inside a block. 0: only at its beginning."""

    @model_validator(mode="before")
    @classmethod
    def _infer_schedule(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("schedule") is not None:
            return values
        given = [schedule for schedule, name in SCHEDULE_PARAMETER.items() if values.get(name) is not None]
        return {**values, "schedule": given[0]} if given else values

    @model_validator(mode="after")
    def _blocks(self) -> SamplingParams:
        if self.steps_per_block is not None:
            if self.steps_per_block > self.block_length:
                raise FieldError(
                    f"{{steps_per_block}} {self.steps_per_block} is more than the {self.block_length} slots of a block"
                )
        elif self.has_even_shares:
            self._check_even_shares(self.num_denoise_steps)
        return self

    def _check_even_shares(self, num_steps: int) -> None:
        self.check_whole_blocks()
        if num_steps % self.num_blocks or num_steps > self.gen_length:
            raise FieldError(
                "{num_denoise_steps} {steps} must be a multiple of the {blocks} blocks "
                "and at most {gen_length} {length}",
                steps=num_steps,
                blocks=self.num_blocks,
                length=self.gen_length,
            )

    def check_whole_blocks(self) -> None:
        """Raise FieldError unless `block_length` divides `gen_length`."""
        if self.gen_length % self.block_length:
            raise FieldError(
                "{block_length} {block} does not divide {gen_length} {length}; take a divisor of {length}",
                block=self.block_length,
                length=self.gen_length,
            )

    @model_validator(mode="after")
    def _temperature(self) -> SamplingParams:
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise FieldError(f"{{temperature}} {self.temperature:g} is neither 0 nor at least {MIN_TEMPERATURE:g}")
        return self

    @model_validator(mode="after")
    def _parameters(self) -> SamplingParams:
        for schedule, name in SCHEDULE_PARAMETER.items():
            is_given, is_taken = getattr(self, name) is not None, self.schedule is schedule
            if is_taken and not is_given:
                raise FieldError(f"{{schedule}} {schedule} needs {{{name}}}")
            if is_given and not is_taken and (name, self.schedule) != ("threshold", Schedule.LEFT_TO_RIGHT):
                raise FieldError(f"{{schedule}} {self.schedule} does not take {{{name}}}; leave it out")
        if self.cfg_scale and self.cache is not Cache.NONE:
            raise FieldError(f"{{cfg_scale}} {self.cfg_scale:g} needs {{cache}} none: guidance has no cached forward")
        if self.edits and self.drawing is not SamplingOrder.SELECT_THEN_SAMPLE:
            raise FieldError(
                "{editing_threshold} needs {drawing} select_then_sample: it looks at what is most probable"
            )
        if self.cache_refresh_steps and self.cache is Cache.NONE:
            raise FieldError(f"{{cache_refresh_steps}} {self.cache_refresh_steps} needs a {{cache}}: prefix or dual")
        return self

    @property
    def edits(self) -> bool:
        """Whether steps also replace committed tokens (token editing)."""
        return self.editing_threshold is not None

    @property
    def has_even_shares(self) -> bool:
        """Whether a step commits an even share of the slots, so that the number of steps is given."""
        return self.schedule in _EVEN_SHARES and self.threshold is None

    @property
    def schedule_name(self) -> str:
        """Label of the schedule in tables: `9 steps`, `threshold 0.9`, `random, 9 steps`."""
        parts = [] if self.schedule is Schedule.QUOTA else [self.schedule.replace("_", " ")]
        if self.has_even_shares:
            num_steps = self.steps_per_block or self.num_denoise_steps
            of = " a block" if self.steps_per_block else ""
            parts.append("1 step" + of if num_steps == 1 else f"{num_steps} steps{of}")
        elif self.schedule is Schedule.LEFT_TO_RIGHT:
            parts.append(f"threshold {self.threshold:g}")
        else:
            parts[0] += f" {getattr(self, SCHEDULE_PARAMETER[self.schedule]):g}"
            if self.schedule is Schedule.THRESHOLD and self.steps_per_block is not None:
                parts.append(f"at most {self.steps_per_block} steps a block")
        if self.editing_threshold is not None:
            parts.append(f"editing above {self.editing_threshold:g}")
        return ", ".join(parts)

    @property
    def num_blocks(self) -> int:
        """Blocks of the completion. A block-causal policy may have one more, if its prompt ends inside a block."""
        return -(-self.gen_length // self.block_length)

    def max_slots(self, *, is_block_causal: bool) -> int:
        """Return the maximum completion slots: a block-causal policy's last block may exceed `gen_length`."""
        return self.gen_length + (self.block_length - 1 if is_block_causal else 0)

    @property
    def num_block_steps(self) -> int:
        """Denoise steps of each block, under schedules that commit even shares."""
        return self.steps_per_block or max(1, self.num_denoise_steps // self.num_blocks)

    @property
    def fixed_num_steps(self) -> int | None:
        """Denoise steps of a completion that fills its canvas, if they are known in advance."""
        is_known = self.has_even_shares and self.steps_per_block is None and not self.edits
        return self.num_denoise_steps if is_known else None

    @property
    def max_committed(self) -> int:
        """Maximum slots that a denoise step writes."""
        is_share = self.has_even_shares and not self.edits
        return -(-self.block_length // self.num_block_steps) if is_share else self.block_length

    @property
    def logp_exact(self) -> bool:
        """Whether `commit_logp` is exact: slots are selected before sampling, or nothing is sampled."""
        return self.drawing is SamplingOrder.SELECT_THEN_SAMPLE or self.temperature == 0


class FinishReason(StrEnum):
    """Why a completion ended."""

    EOS = "eos"
    LENGTH = "length"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Committed:
    """Finished first blocks of a completion: the record of their [C] slots, as in `Completion`."""

    token_ids: NDArray[np.int32]
    step_map: NDArray[np.int32]
    commit_logp: NDArray[np.float32]
    commit_logp_raw: NDArray[np.float32]
    commit_entropy: NDArray[np.float32]
    commit_law_entropy: NDArray[np.float32]
    fallback: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_steps(self) -> int:
        """Denoise steps that these blocks took. Each step commits something, so the last one is in `step_map`."""
        return int(self.step_map.max(initial=-1)) + 1

    @classmethod
    def joined(cls, parts: Sequence[Committed]) -> Committed | None:
        """Concatenate the records of consecutive blocks; None if there are none."""
        if not parts:
            return None
        names = [column.name for column in fields(cls)]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Writes:
    """Every token that was written under token editing, in the order of the steps: [E] each.

    The writes of earlier steps give the block before a step. The sum of `logp` is the trajectory's log-likelihood.
    """

    steps: NDArray[np.int32]
    """Denoise steps, as in `Completion.step_map`."""
    slots: NDArray[np.int32]
    """Completion slots. A write to a slot that was written before is an edit."""
    token_ids: NDArray[np.int32]
    """Tokens that were written."""
    logp: NDArray[np.float32]
    """As `Completion.commit_logp`; the next as `Completion.commit_logp_raw`."""
    logp_raw: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.steps)

    @classmethod
    def none(cls) -> Writes:
        """Return an empty log."""
        ints, floats = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
        return cls(steps=ints, slots=ints, token_ids=ints, logp=floats, logp_raw=floats)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepAnswers:
    """Completions of the states before K denoise steps: the committed tokens, and in each masked slot the most probable
    one, or with `Request.samples_step_answers` a sample. They have L = `gen_length` slots."""

    steps: NDArray[np.int32]
    """[K] the denoise steps, those whose tokens have the highest mean entropy first."""
    token_ids: NDArray[np.int32]
    """[K, L] the tokens, of blocks that were not denoised too."""
    num_tokens: NDArray[np.int32]
    """[K] tokens up to and including the first end of text."""
    ended: NDArray[np.bool_]
    """[K] whether there is an end of text."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Progress:
    """Current state of a completion that is being denoised. L is all its slots: `Canvas.num_slots`, or those of all
    canvases under renoising."""

    num_steps: int
    """Denoise steps done."""
    num_committed: int
    """Slots of the finished blocks, which no longer change."""
    masked: NDArray[np.bool_]
    """[L] whether the slot is not committed yet; its record is then meaningless."""
    slots: Committed
    """The record of all L slots."""

    @property
    def committed(self) -> Committed:
        """The finished blocks."""
        return self.between(0)

    def between(self, start: int) -> Committed:
        """Return the finished blocks from slot `start` on."""
        columns = {column.name: getattr(self.slots, column.name) for column in fields(Committed)}
        return Committed(**{name: values[start : self.num_committed] for name, values in columns.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One completion to sample."""

    prompt_ids: tuple[int, ...]
    """[P] token ids, the chat template applied."""
    params: SamplingParams
    """How to denoise it."""
    seed: int
    """Keys every random draw together with the denoise step and the slot: same seed and weights, same tokens."""
    fixed_tokens: Mapping[int, int] = field(default_factory=dict)
    """Tokens that are given inside the completion (infill): slot, counted from 0, to token id."""
    grammar: Grammar | None = None
    """Grammar that the completion satisfies, whatever the schedule. A step commits only those of its chosen tokens that
    fit together, so there may be more steps."""
    committed: Committed | None = None
    """Blocks that were finished before the same request was interrupted; None begins at the first. The completion is
    the same as without the interruption: a draw depends on step and slot only. (The last bits of a logit can differ
    with the batch.)"""
    num_step_answers: int = 0
    """Record the completions of the states before this many denoise steps, for learners that grade them. Needs a
    bidirectional policy and no KV cache, so that every step predicts the whole canvas. 0: none, at no cost."""
    samples_step_answers: bool = False
    """Fill the masked slots of step answers with the tokens that the step sampled, as `sample_then_select` samples
    them, instead of the most probable ones. The tokens that the step commits are among them."""

    node_seeds: tuple[int, ...] = ()
    """Seeds of the first levels of a rollout tree, in place of `seed`: the denoise steps are divided evenly among these
    and `seed`. Requests of a prompt write the same tokens until their seeds differ, and share a forward while they are
    at the same step. (The last bits of a logit depend on the batch, so they may diverge earlier.)"""

    @property
    def draw_keys(self) -> tuple[int, ...]:
        """Keys of the random draws, one for each level. They are hashes, because the seeds 0, 1, 2, ... differ in the
        same bits as steps and slots, and would share draws."""
        return tuple(fold(seed, _DRAW_KEY) for seed in (*self.node_seeds, self.seed))

    @property
    def steps_per_level(self) -> int:
        """Denoise steps of each level; the last may have more."""
        return max(1, self.params.num_block_steps * self.params.num_blocks // (len(self.node_seeds) + 1))


def canvas_of(request: Request, config: TransformerConfig) -> Canvas:
    """Return the layout of a request's canvas for a policy of this family."""
    return Canvas(
        prompt_length=len(request.prompt_ids),
        gen_length=request.params.gen_length,
        block_length=request.params.block_length,
        is_block_causal=config.is_block_causal,
    )


def canvas_grammar_of(request: Request, config: TransformerConfig) -> CanvasGrammar | None:
    """Return the grammar of a request on its canvas before the first step, or None if it has no grammar."""
    if request.grammar is None:
        return None
    params, num_slots = request.params, canvas_of(request, config).num_slots
    ends = config.stop_ids if params.stop_ids is None else params.stop_ids
    forbidden = {config.mask_token_id, *params.forbidden_ids}
    # A block-causal policy's canvas may have more slots than its text.
    grammar = masked_canvas(request.grammar, num_slots, ends, forbidden, params.gen_length)
    tokens, masked = np.zeros(num_slots, dtype=np.int64), np.ones(num_slots, dtype=bool)
    for slot, token in request.fixed_tokens.items():
        tokens[slot], masked[slot] = token, False
    grammar.update(tokens, masked)
    return grammar


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Completion:
    """One sampled completion with its trajectory: when, and with what probability, each token was committed.

    All arrays have length C, the slots that were denoised: whole blocks up to the one that holds the first end of
    text. Tokens after the end of text in that block are kept, for in a bidirectional model they influenced later
    commits. The text ends after `num_tokens`.
    """

    token_ids: NDArray[np.int32]
    """[C] the tokens, committed or given, the whole terminal block included."""
    num_tokens: int
    """Tokens up to and including the first end of text: what is graded and trained on."""
    step_map: NDArray[np.int32]
    """[C] the denoise step, counted over the completion from 0, that committed a slot; -1 where it was given."""
    commit_logp: NDArray[np.float32]
    """[C] log-probability, in nats, of the token under the distribution it was sampled from: temperature, top-p and
    top-k applied (0 at temperature 0). This and the next three are 0 where the token was given."""
    commit_logp_raw: NDArray[np.float32]
    """[C] log-probability, in nats, of the token at temperature 1 among all tokens but the forbidden."""
    commit_entropy: NDArray[np.float32]
    """[C] entropy, in nats, of that prediction at temperature 1, at commit."""
    commit_law_entropy: NDArray[np.float32]
    """[C] entropy, in nats, of the distribution that the token was sampled from (0 at temperature 0)."""
    fallback: NDArray[np.bool_]
    """[C] whether the slot did not pass the schedule's test, and was committed only to reach the step's minimum."""
    num_forwards: int
    """Forwards that this completion took part in; two for each step with classifier-free guidance. Includes steps of
    token editing that wrote nothing, which `step_map` does not count."""
    exact: bool
    """Whether replaying (token_ids, step_map), or `writes`, through full forwards reproduces the log-probabilities: no
    approximate KV cache."""
    logp_exact: bool
    """Whether `commit_logp` is exact: not under `sample_then_select` above temperature 0."""
    finish_reason: FinishReason
    """Why it ended."""
    policy_version: int
    """The policy version that sampled all of its tokens."""
    writes: Writes | None = None
    """Under token editing: all writes, except those in `Request.committed`. The arrays above describe the last write to
    each slot."""
    step_answers: StepAnswers | None = None
    """The answers that `Request.num_step_answers` asks for, of at most as many steps; None if it is 0."""
