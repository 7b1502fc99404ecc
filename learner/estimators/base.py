"""What all likelihood estimators share.

Shape letters: B rows, P prompt, L completion slots, R canvases.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Protocol

from pydantic import Field

from learner.batch import CompletionBatch, GroupedBatch
from learner.counter import uniform
from learner.estimators.terms import Corruption
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

Probability = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerFacts:
    """What a learner must know of how its completions are sampled."""

    temperature: float = 1.0
    """Tokens are drawn from softmax(logits / temperature)."""
    block_length: int = 32
    """Slots of a block."""
    most_steps: int = 128
    """Denoise steps that a completion can take at most."""
    forbidden_ids: tuple[int, ...] = ()
    """Ids that are never drawn, besides the mask id."""
    records_law: bool = True
    """Whether the recorded log-probabilities replay: no cache, no guidance, the whole vocabulary."""
    draws_law: bool = True
    """Whether they are the law of the draws too: positions are selected before they are sampled."""
    has_fallback: bool = False
    """Whether its schedule can fail to find a slot, and says so when it then commits one all the same."""
    has_varying_steps: bool = False
    """Whether completions differ in how many denoise steps a block takes."""
    edits: bool = False
    """Whether tokens are replaced until their block is finished (token editing): every write is recorded then."""
    is_block_causal: bool = False
    """Whether the policy is: its blocks are counted from the first column of a canvas, and not from a prompt's end."""

    def blocks(self, batch: CompletionBatch) -> Tensor:
        """[B, L] int64: the sampler's block that each completion slot is in; the first is 0."""
        slots_L = torch.arange(batch.num_slots, device=batch.prompt_ids.device)
        in_prompt_B = batch.prompt_lengths % self.block_length if self.is_block_causal else 0 * batch.prompt_lengths
        return (in_prompt_B[:, None] + slots_L) // self.block_length


@dataclass(frozen=True, slots=True)
class InnerUpdate:
    """One of the sweeps through a round's completions."""

    index: int
    """0, 1, ..."""
    count: int
    """How many there are (mu)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimatorFacts:
    """What an objective must know of how likelihoods are estimated. The defaults are those of one canvas for a row."""

    sums_up: bool = False
    """Whether the values of a completion's terms add up to its log-likelihood, or a bound or an estimate of it."""
    replays: bool = False
    """Whether each token is scored in the state, and under the law, that it was committed in: comparable with what the
    sampler recorded."""
    has_single_draws: bool = False
    """Whether each draw is an estimate of its own."""
    scores_order: bool = False
    """Whether it scores too which slots were committed before the others."""
    splits_tokens: bool = False
    """Whether a token can be scored in more than one draw or segment of its completion."""
    splits_rows: bool = False
    """Whether a completion can."""


class ScoredSlots(StrEnum):
    """The completion slots that a likelihood is about."""

    TEXT = "text"
    """Those up to and including the first end of text."""
    DENOISED = "denoised"
    """Those that the sampler denoised, whole blocks up to the one that the text ends in."""
    CANVAS = "canvas"
    """All of them, with what fills up the canvas after the last block that was denoised, which nobody sampled."""


class Estimator(Protocol):
    """A config that says which corrupted canvases give the likelihood of a batch."""

    @property
    def name(self) -> str:
        """What the recipe calls it."""

    @property
    def facts(self) -> EstimatorFacts:
        """What objectives must know of its likelihoods."""

    def corrupt(self, batch: GroupedBatch, update: InnerUpdate, sampler: SamplerFacts) -> Corruption:
        """The canvases to run for one inner update: a pure function of its arguments."""

    def mask_key(self, update: InnerUpdate) -> int:
        """Equal for inner updates with equal canvases: their old likelihoods are computed once."""

    def sizes(self, batch: GroupedBatch) -> Tensor:
        """[B] the completion slots that a row's value covers."""

    def refusal(self, sampler: SamplerFacts) -> str | None:
        """Why it cannot work with a sampler like this; None where it can."""


def covered(batch: GroupedBatch, slots: ScoredSlots) -> Tensor:
    """[B, L] bool: the slots that a likelihood is about; none of a row that only fills a shard."""
    if slots is ScoredSlots.TEXT:
        return batch.completion_mask()
    is_row_B1 = (batch.completion_lengths > 0)[:, None]
    return is_row_B1 & (batch.step_map >= 0) if slots is ScoredSlots.DENOISED else is_row_B1.expand(-1, batch.num_slots)


def prompt_mask(batch: CompletionBatch, probability: float, *keys: Tensor | int) -> Tensor | None:
    """[B, P] bool: each prompt token with this probability, drawn by the row's key and `keys`."""
    if probability == 0:
        return None
    columns_P = torch.arange(batch.prompt_ids.shape[1], device=batch.prompt_ids.device)
    return uniform(batch.sample_keys[:, None], *keys, columns_P) < probability


def repeated(batch: CompletionBatch, count: int) -> tuple[Tensor, Tensor]:
    """The rows [B * count] of `count` canvases for each row of a batch, and each one's number [B * count]: 0, 1, ..."""
    rows_B = torch.arange(batch.num_rows, device=batch.prompt_ids.device)
    draws = torch.arange(count, device=batch.prompt_ids.device)
    return rows_B.repeat_interleave(count), draws.repeat(batch.num_rows)
