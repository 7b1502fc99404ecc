"""The interface of likelihood estimators, and the sampler properties that they depend on.

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
from learner.estimators.views import ScoringDistribution
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

Probability = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerFacts:
    """The sampler's properties that the learner depends on."""

    temperature: float = 1.0
    """Tokens are sampled from softmax(logits / temperature)."""
    block_length: int = 32
    """Slots of a block."""
    num_blocks: int = 4
    """Blocks of a canvas."""
    max_denoise_steps: int = 128
    """Maximum denoise steps of a completion."""
    forbidden_ids: tuple[int, ...] = ()
    """Ids that are never sampled, besides the mask id."""
    has_reproducible_logps: bool = True
    """Whether the learner can reproduce the recorded log-probabilities: no cache, no guidance, the whole vocabulary."""
    has_exact_logps: bool = True
    """Whether they are also those of the sampling distribution: slots are selected before their tokens are sampled."""
    is_fp8: bool = False
    """Whether the sampler computes in FP8, so that the recorded log-probabilities are of another policy."""
    has_fallback: bool = False
    """Whether a step can find no slot that meets its criterion, commit one anyway, and record it in `fallback`."""
    has_varying_steps: bool = False
    """Whether the number of denoise steps of a block varies between completions."""
    edits: bool = False
    """Whether tokens can be replaced until their block is finished (token editing); every write is recorded then."""
    predicts_canvas: bool = True
    """Whether every denoise step can predict all masked slots of the canvas: no KV cache, no blocks that a policy
    cannot see yet."""
    is_block_causal: bool = False
    """Whether the policy is block-causal: blocks are counted from a canvas's first column, not from the prompt's end.
    """

    @property
    def distribution(self) -> ScoringDistribution:
        """The distribution that tokens are sampled from; at temperature 0 the prediction that they are the best of."""
        return ScoringDistribution(
            temperature=self.temperature or 1.0, excludes_mask_id=True, forbidden_ids=self.forbidden_ids
        )

    def blocks(self, batch: CompletionBatch) -> Tensor:
        """Return the sampler's block of each completion slot, [B, L] int64; the first is 0."""
        slots_L = torch.arange(batch.num_slots, device=batch.prompt_ids.device)
        in_prompt_B = batch.prompt_lengths % self.block_length if self.is_block_causal else 0 * batch.prompt_lengths
        return (in_prompt_B[:, None] + slots_L) // self.block_length


@dataclass(frozen=True, slots=True)
class InnerUpdate:
    """One sweep through a round's completions."""

    index: int
    """0, 1, ..."""
    count: int
    """Number of sweeps (mu)."""


class RowValue(StrEnum):
    """What the weighted log-probabilities of a completion's terms add up to."""

    SCORES = "scores"
    """Scores of its tokens, or of some of them: no value of the completion as a whole."""
    MASKED_MEAN = "masked mean"
    """The mean over draws of random masks of the mean log-probability of the tokens that a draw masks."""
    ELBO = "elbo"
    """Its evidence lower bound (ELBO), an expectation over random masks."""
    LOG_LIKELIHOOD = "log-likelihood"
    """Its log-likelihood along the path that the sampler took, or an unbiased estimate of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimatorFacts:
    """The estimator's properties that objectives depend on. The defaults are those of one canvas per row."""

    row_value: RowValue = RowValue.SCORES
    """What the values of a completion's terms add up to."""
    matches_sampler_record: bool = False
    """Whether each token is scored in the state, and under the distribution, in which it was committed, so that its
    log-probability is comparable with the sampler's record."""
    has_separate_draws: bool = False
    """Whether each draw is a separate estimate."""
    scores_order: bool = False
    """Whether the order in which slots were committed is scored too."""
    splits_tokens: bool = False
    """Whether a token can be scored in more than one draw or segment of its completion."""
    splits_rows: bool = False
    """Whether a completion can be scored in more than one draw or segment."""
    parts_are_canvases: bool = False
    """Whether each part is one canvas, on which the weight of every token's log-probability is 1."""
    parts_are_steps: bool = False
    """Whether the number of a part is the denoise step before which its canvas stood."""


class ScoredSlots(StrEnum):
    """The completion slots that a likelihood covers."""

    TEXT = "text"
    """Those up to and including the first end of text."""
    DENOISED = "denoised"
    """Those that the sampler denoised: whole blocks, up to the one in which the text ends."""
    CANVAS = "canvas"
    """All slots, including the fill after the last denoised block, which was not sampled."""


class Estimator(Protocol):
    """Config of an estimator: determines which corrupted canvases give the likelihood of a batch."""

    @property
    def name(self) -> str:
        """Its name in a recipe."""

    @property
    def facts(self) -> EstimatorFacts:
        """The properties that objectives depend on."""

    def corrupt(self, batch: GroupedBatch, update: InnerUpdate, sampler: SamplerFacts) -> Corruption:
        """Return the canvases to run for one inner update, as a pure function of the arguments."""

    def mask_key(self, update: InnerUpdate) -> int:
        """Return a key that is equal for inner updates with equal canvases, whose old likelihoods are computed once."""

    def sizes(self, batch: GroupedBatch) -> Tensor:
        """Return the number of completion slots that each row's value covers, [B]."""

    def incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return why it cannot work with such a sampler; None if it can."""


def rewriting_refusal(estimator: str, sampler: SamplerFacts) -> str | None:
    """Return why an estimator that scores each token in one state cannot take token editing; None without it."""
    if not sampler.edits:
        return None
    return (
        f"estimator {estimator} takes each token to be written once, and rollout.sampling.editing_threshold "
        "has tokens written more than once: leave editing_threshold out"
    )


def covered_slots(batch: GroupedBatch, slots: ScoredSlots) -> Tensor:
    """Return the slots that a likelihood covers, [B, L] bool; none of a row that only pads a shard."""
    if slots is ScoredSlots.TEXT:
        return batch.completion_mask()
    is_row_B1 = (batch.completion_lengths > 0)[:, None]
    return is_row_B1 & (batch.step_map >= 0) if slots is ScoredSlots.DENOISED else is_row_B1.expand(-1, batch.num_slots)


def prompt_mask(batch: CompletionBatch, probability: float, *keys: Tensor | int) -> Tensor | None:
    """Mask each prompt token with this probability, [B, P] bool, keyed by the row's key and `keys`; None for 0."""
    if probability == 0:
        return None
    columns_P = torch.arange(batch.prompt_ids.shape[1], device=batch.prompt_ids.device)
    return uniform(batch.sample_keys[:, None], *keys, columns_P) < probability


def repeat_rows(batch: CompletionBatch, count: int) -> tuple[Tensor, Tensor]:
    """Return the rows [B * count] of `count` canvases per row, and each canvas's number in its row, [B * count]."""
    rows_B = torch.arange(batch.num_rows, device=batch.prompt_ids.device)
    draws = torch.arange(count, device=batch.prompt_ids.device)
    return rows_B.repeat_interleave(count), draws.repeat(batch.num_rows)
