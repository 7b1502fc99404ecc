"""The trajectory estimator: likelihoods in the decoding states that the sampler went through.

The canvas before a denoise step shows the tokens that were committed before it and masks the rest. With one segment per
step every token is scored in the state in which it was committed, and the product over tokens is the exact likelihood
of the trajectory (CJ-GRPO). With a sampler whose blocks have one slot, it is the autoregressive factorisation
(JustGRPO, arXiv 2601.15165).

Longer segments cost fewer forwards: d2's StepMerge (arXiv 2509.21474), which with one segment is diffu-GRPO's estimate,
TraceRL's slices (arXiv 2509.06949), and LightningRL's blocks (arXiv 2603.13319). Sampled segments cost fewer still.
They are importance-weighted to stay unbiased (AGRPO), or taken as representative of all (MAPG, arXiv 2607.15200).
EGSPO (arXiv 2603.12554) trains only the steps of the highest entropy. The segments of d-TreeRPO (arXiv 2512.09675) are
the levels of a rollout tree, and what several completions share is scored once.

Shape letters: B rows, L completion slots, R canvases, K segments of the row with the most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from learner.batch import GroupedBatch
from learner.counter import uniform
from learner.estimators.base import (
    EstimatorFacts,
    InnerUpdate,
    Probability,
    RowValue,
    SamplerFacts,
    ScoredSlots,
    covered_slots,
    prompt_mask,
)
from learner.estimators.edits import edited, steps_to_score
from learner.estimators.terms import Corruption
from learner.estimators.tree_levels import slots_of_nodes, tree_refusal
from learner.estimators.views import SOFTMAX, ScoringDistribution
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

CHOICE_KEY, _PROMPT_KEY = 21, 22
_MIN_ENTROPY = 1e-2


class TrajectoryConfig(BaseModel):
    """Config of the estimator: each canvas scores what was committed in the segment of steps that begins with it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Literal["trajectory"] = "trajectory"
    """The estimator."""
    num_segments: PositiveInt | None = None
    """Number of equally long segments of a canvas's denoise steps (d2: 8 or 16). A completion that ends early has only
    the first of them."""
    steps_per_segment: PositiveInt | None = None
    """Or the denoise steps of a segment (TraceRL's shrink): 1 is exact. Under a block-causal policy a segment stays
    within a block, and steps are counted from the block's first."""
    blocks_per_segment: PositiveInt | None = None
    """Or the sampler's blocks of a segment: 1 scores each block in its initial state, however many steps it then took
    (LightningRL)."""
    branches: Annotated[tuple[Annotated[int, Field(ge=2)], ...], Field(min_length=2)] | None = None
    """Or the levels of a rollout tree, equally long in denoise steps (d-TreeRPO: 4 and 4): the completions of a problem
    are a tree's leaves, and each canvas at the start of a level has so many children. `group_size` is their product.
    A level is scored once for all completions that share it, up to the first end of text on the canvas at its end."""
    num_shown_steps: NonNegativeInt = 0
    """Initial denoise steps whose tokens are always shown and not scored; the segments begin after them (MAPG: 1)."""
    num_sampled: PositiveInt | None = None
    """Segments of each completion, of those with a token to score, that are sampled at every update; null: all."""
    proposal: Literal["uniform", "entropy", "top_entropy"] = "uniform"
    """How segments are chosen: at random, uniformly without replacement, or in proportion to the entropy of the
    distributions that their tokens were sampled from (AGRPO). With `top_entropy` the first update takes the segments
    of highest mean entropy of their tokens' softmax, the second the next ones (EGSPO)."""
    slots: Literal["text", "denoised"] = "text"
    """The slots that are scored: the text's, up to and including its first end of text; or all denoised ones, in the
    steps up to the last that commits anything but an end of text (AGRPO)."""
    only: Literal["all", "fallback", "uncertain"] = "all"
    """The tokens that are scored: all; those that a step committed only because it must commit one (ForkGRPO); or the
    `uncertain_share` with the highest entropy at commit (JustGRPO's fast variant)."""
    uncertain_share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of a completion's tokens that counts as uncertain."""
    law: Literal["softmax", "sampler"] = "softmax"
    """The distribution that tokens are scored under: the plain softmax, or the one that the sampler samples from, at
    its temperature and without the mask id."""
    weigh: Literal["loss", "mean", "value"] = "loss"
    """What sampled segments estimate: the sum of all segments' losses, or their mean (AGRPO); or, with a ratio of whole
    completions, the completion's value, from the mean sampled token (MAPG)."""
    scores_order: bool = False
    """Score the commit order too: the committed slots against all that the segment leaves masked (MAPG). For
    `objective.order_temperature`."""
    p_mask_prompt: Probability = 0.0
    """Probability that a prompt token is masked (d2: 0.15)."""
    requires_block_length: PositiveInt | None = None
    """Reject samplers with another block length: with blocks of 1 the likelihood is autoregressive (JustGRPO)."""

    @model_validator(mode="after")
    def _one_length(self) -> TrajectoryConfig:
        given = (self.num_segments, self.steps_per_segment, self.blocks_per_segment, self.branches)
        if sum(length is not None for length in given) != 1:
            raise ValueError("give one of num_segments, steps_per_segment, blocks_per_segment and branches")
        return self

    @model_validator(mode="after")
    def _whole_levels(self) -> TrajectoryConfig:
        others = (self.num_shown_steps, self.num_sampled, self.slots, self.only, self.weigh, self.scores_order)
        if self.branches is not None and others != (0, None, "text", "all", "loss", False):
            raise ValueError(
                "branches needs num_shown_steps 0, num_sampled null, slots: text, only: all, weigh: loss and "
                "scores_order false: all tokens of a level are scored, with equal weights"
            )
        return self

    @model_validator(mode="after")
    def _uniform_if_tokens_represent_all(self) -> TrajectoryConfig:
        if self.weigh == "value" and self.proposal != "uniform":
            raise ValueError(
                f"weigh: value takes the drawn tokens for all: proposal must be uniform, not {self.proposal}"
            )
        return self

    @model_validator(mode="after")
    def _counted_if_ranked(self) -> TrajectoryConfig:
        if self.proposal == "top_entropy" and (self.num_sampled is None or self.weigh != "loss"):
            raise ValueError("proposal: top_entropy needs num_sampled, the segments of an update, and weigh: loss")
        return self

    @property
    def facts(self) -> EstimatorFacts:
        """A token is committed in one segment, a completion in several."""
        is_whole = self.only == "all" and (self.num_sampled is None or self.weigh == "value") and self.branches is None
        is_exact = self.steps_per_segment == 1 and self.law == "sampler" and self.p_mask_prompt == 0
        return EstimatorFacts(
            row_value=RowValue.LOG_LIKELIHOOD if is_whole else RowValue.SCORES,
            matches_sampler_record=is_exact,
            scores_order=self.scores_order,
            splits_rows=True,
        )

    def corrupt(self, batch: GroupedBatch, update: InnerUpdate, sampler: SamplerFacts) -> Corruption:
        """Return one canvas for each segment that commits a scored token."""
        if batch.writes is not None and batch.write_logp is not None:
            has_scored_BK = steps_to_score(batch, batch.writes)
            importance_BK = self._importance(
                batch, has_scored_BK, torch.zeros_like(has_scored_BK, dtype=torch.float32), update
            )
            return edited(batch, batch.writes, batch.write_logp, importance_BK, self._scoring_distribution(sampler))
        segment_BL = self._segments(batch, sampler)
        scored_BL, has_scored_BK, entropy_BK = self._scored(batch, segment_BL)
        importance_BK = self._importance(batch, has_scored_BK, entropy_BK, update)
        rows_R, parts_R = (importance_BK > 0).nonzero(as_tuple=True)
        segment_RL = segment_BL[rows_R]
        prompt_BP = prompt_mask(batch, self.p_mask_prompt, _PROMPT_KEY, self.mask_key(update))
        is_committed_RL = segment_RL == parts_R[:, None]
        scored_RL = scored_BL[rows_R] & is_committed_RL
        # Slots after the last denoised block were never committed, and are always masked.
        masked_RL = (segment_RL >= parts_R[:, None]) | (batch.step_map[rows_R] < 0)
        is_of_value = self.weigh == "value"
        return Corruption(
            rows=rows_R,
            masked=masked_RL,
            scored=scored_RL,
            rivals=masked_RL & ~is_committed_RL if self.scores_order else None,
            prompt_masked=None if prompt_BP is None else prompt_BP[rows_R],
            parts=parts_R,
            weights=self._shares(batch, rows_R, scored_RL) if is_of_value else None,
            importance=None if is_of_value else importance_BK[rows_R, parts_R][:, None].expand_as(scored_RL),
            distribution=self._scoring_distribution(sampler),
        )

    def scored_segments(self, batch: GroupedBatch, sampler: SamplerFacts) -> Tensor:
        """Return the segment that scores each slot, [B, L] int64; -1 where none does."""
        segment_BL = self._segments(batch, sampler)
        return torch.where(self._scored(batch, segment_BL)[0], segment_BL, -1)

    def step_ranks(self, batch: GroupedBatch, sampler: SamplerFacts) -> Tensor:
        """Return the place of each segment in the order of `proposal: top_entropy`, [B, K] int64; -1: not trained."""
        _, has_scored_BK, entropy_BK = self._scored(batch, self._segments(batch, sampler))
        return _ranks(entropy_BK, has_scored_BK)

    def _scored(self, batch: GroupedBatch, segment_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the slots that may be scored, [B, L] bool, the segments that have any, [B, K], and their entropies."""
        covered_BL = (
            self._covered(batch) if self.branches is None else slots_of_nodes(batch, segment_BL, len(self.branches))
        )
        covered_BL &= segment_BL >= 0
        scored_BL = covered_BL & self._selected(batch)
        num_segments = int(segment_BL.max().clamp(min=0)) + 1
        has_scored_BK = torch.zeros(batch.num_rows, num_segments, dtype=torch.bool, device=segment_BL.device)
        rows_N, slots_N = scored_BL.nonzero(as_tuple=True)
        has_scored_BK[rows_N, segment_BL[rows_N, slots_N]] = True
        if batch.step_rewards is not None and self.proposal == "top_entropy":
            has_scored_BK &= ~batch.step_rewards[:, :num_segments].isnan()
        return scored_BL, has_scored_BK, self._entropies(batch, segment_BL.clamp(min=0), covered_BL, num_segments)

    def mask_key(self, update: InnerUpdate) -> int:
        """Return 0 if canvases are not random, else the index of the update."""
        return update.index if self.num_sampled is not None or self.p_mask_prompt > 0 else 0

    def sizes(self, batch: GroupedBatch) -> Tensor:
        """Return the number of tokens that may be scored, [B]."""
        return batch.completion_lengths if self.slots == "text" else self._covered(batch).sum(dim=1)

    def incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return why the sampler's trajectories cannot be scored with these settings; None if they can."""
        if sampler.edits and (given := self._unsupported_by_edits()):
            return (
                f"estimator.{given}, and rollout.sampling.editing_threshold has tokens written more than once: of a "
                "trajectory every write is scored, each in the state before its step, as learner.algorithm cj-grpo "
                "does; take that, or leave editing_threshold out"
            )
        if self.only == "fallback" and not sampler.has_fallback:
            return "estimator.only is fallback; the sampler's schedule never falls back: set rollout.sampling.threshold"
        if self.requires_block_length not in (None, sampler.block_length):
            return (
                f"estimator.requires_block_length is {self.requires_block_length}; "
                f"rollout.sampling.block_length is {sampler.block_length} and must be the same"
            )
        if self.scores_order and sampler.is_block_causal:
            return (
                "estimator.scores_order is true, and a block-causal policy orders the slots of a block alone, and not "
                "those of later blocks: take another learner.algorithm"
            )
        if self.num_shown_steps >= sampler.max_denoise_steps:
            return (
                f"estimator.num_shown_steps is {self.num_shown_steps}, and a completion takes at most "
                f"{sampler.max_denoise_steps} of rollout.sampling's denoise steps: nothing would be scored; "
                "make it less"
            )
        return None if self.branches is None else tree_refusal(sampler, len(self.branches))

    def _unsupported_by_edits(self) -> str | None:
        """Return the first setting that single writes do not support; None if there is none."""
        said = {
            f"steps_per_segment is {self.steps_per_segment or 'null'}": self.steps_per_segment != 1,
            f"only is {self.only}": self.only != "all",
            f"slots is {self.slots}": self.slots != "text",
            f"proposal is {self.proposal}": self.proposal != "uniform",
            f"weigh is {self.weigh}": self.weigh == "value",
            f"num_shown_steps is {self.num_shown_steps}": self.num_shown_steps > 0,
            "scores_order is true": self.scores_order,
            f"p_mask_prompt is {self.p_mask_prompt:g}": self.p_mask_prompt > 0,
        }
        return next((what for what, is_so in said.items() if is_so), None)

    def _scoring_distribution(self, sampler: SamplerFacts) -> ScoringDistribution:
        return SOFTMAX if self.law == "softmax" else sampler.distribution

    def _segments(self, batch: GroupedBatch, sampler: SamplerFacts) -> Tensor:
        """Return the segment that commits each slot, [B, L] int64, negative if none does."""
        step_BL = batch.step_map - self.num_shown_steps
        if self.blocks_per_segment is not None:
            return torch.where(step_BL < 0, -1, sampler.blocks(batch) // self.blocks_per_segment)
        if self.steps_per_segment is not None:
            if sampler.is_block_causal and self.steps_per_segment > 1:
                return self._segments_of_blocks(batch, sampler.blocks(batch), self.steps_per_segment)
            return torch.where(batch.step_map < 0, -1, step_BL // self.steps_per_segment)
        num_segments = len(self.branches) if self.branches is not None else self.num_segments
        assert num_segments is not None, "one of the four is given"
        # Segment n begins at step floor(n * steps / segments), as d2's snapshots do. The steps are those of the whole
        # canvas, at as many per slot as the completion took.
        num_steps_B1 = (batch.step_map.amax(dim=1, keepdim=True) + 1) * batch.num_slots
        num_denoised_B1 = (batch.step_map >= 0).sum(dim=1, keepdim=True)
        segment_BL = ((step_BL + 1) * num_segments * num_denoised_B1 - 1) // num_steps_B1.clamp(min=1)
        return torch.where(batch.step_map < 0, -1, segment_BL)

    def _segments_of_blocks(self, batch: GroupedBatch, block_BL: Tensor, num_steps: int) -> Tensor:
        """Return the same with separate segments for each block (TraceRL's slices of a block diffusion model)."""
        is_seen_BL = batch.step_map >= self.num_shown_steps
        first_BN = torch.full_like(block_BL, int(batch.step_map.max()) + 1)
        first_BN.scatter_reduce_(1, block_BL, torch.where(is_seen_BL, batch.step_map, first_BN), "amin")
        within_BL = (batch.step_map - first_BN.gather(1, block_BL)) // num_steps
        num_segments = int(within_BL[is_seen_BL].max()) + 1 if bool(is_seen_BL.any()) else 1
        return torch.where(is_seen_BL, block_BL * num_segments + within_BL, -1)

    def _covered(self, batch: GroupedBatch) -> Tensor:
        """Return the committed slots of the text, or those up to the last step that commits text, [B, L] bool."""
        if self.slots == "text":
            return batch.completion_mask() & (batch.step_map >= 0)
        last_step_B1 = batch.step_map.masked_fill(batch.is_stop, -1).amax(dim=1, keepdim=True)
        return covered_slots(batch, ScoredSlots.DENOISED) & (batch.step_map <= last_step_B1)

    def _selected(self, batch: GroupedBatch) -> Tensor:
        """Return the tokens that `only` selects, [B, L] bool."""
        if self.only == "all":
            return torch.ones_like(batch.fallback)
        if self.only == "fallback":
            return batch.fallback
        is_text = batch.completion_mask()
        entropy_BL = batch.commit_entropy.masked_fill(~is_text, -torch.inf)
        rank_BL = entropy_BL.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        kept_B = (batch.completion_lengths * self.uncertain_share).ceil().long()
        return is_text & (rank_BL < kept_B[:, None])

    def _entropies(self, batch: GroupedBatch, segment_BL: Tensor, covered_BL: Tensor, num_segments: int) -> Tensor:
        """Return the entropy of each segment's tokens, [B, K] float32 in nats: their sum, or for `top_entropy` mean."""
        is_top = self.proposal == "top_entropy"
        entropy_BL = batch.commit_entropy if is_top else batch.commit_law_entropy
        sums_BK = entropy_BL.new_zeros(batch.num_rows, num_segments)
        sums_BK.scatter_add_(1, segment_BL, entropy_BL * covered_BL)
        if not is_top:
            return sums_BK
        return sums_BK / torch.zeros_like(sums_BK).scatter_add_(1, segment_BL, covered_BL.float()).clamp(min=1)

    def _importance(
        self, batch: GroupedBatch, has_scored_BK: Tensor, entropy_BK: Tensor, update: InnerUpdate
    ) -> Tensor:
        """Return the loss weight of the tokens of each segment, [B, K] float32; a segment with 0 is not run."""
        importance_BK = self._importance_weights(batch, has_scored_BK, entropy_BK, update)
        return (
            importance_BK / has_scored_BK.sum(dim=1, keepdim=True).clamp(min=1)
            if self.weigh == "mean"
            else importance_BK
        )

    def _importance_weights(
        self, batch: GroupedBatch, has_scored_BK: Tensor, entropy_BK: Tensor, update: InnerUpdate
    ) -> Tensor:
        """Return each segment's importance weight, [B, K] float32: 1, or its draws over the expected number of them."""
        if self.num_sampled is None:
            return has_scored_BK.float()
        if self.proposal == "uniform":
            return _sample_uniformly(batch.sample_keys, has_scored_BK, self.num_sampled, update)
        if self.proposal == "top_entropy":
            return _ranked(entropy_BK, has_scored_BK, self.num_sampled, update)
        # The floor gives segments without entropy a chance, or the estimate would be biased. It also bounds their
        # importance weight, which would dominate all others.
        weight_BK = (entropy_BK + _MIN_ENTROPY) * has_scored_BK
        chance_BK = weight_BK / weight_BK.sum(dim=1, keepdim=True).clamp(min=1e-12)
        # Systematic sampling: one uniform number per row, the other points evenly after it (low discrepancy).
        start_B = uniform(batch.sample_keys, update.index, CHOICE_KEY)
        ends_BK = chance_BK.cumsum(dim=1) * self.num_sampled
        reached_BK = (ends_BK - start_B[:, None]).ceil().clamp(min=0, max=self.num_sampled)
        sampled_BK = reached_BK.diff(dim=1, prepend=torch.zeros_like(reached_BK[:, :1])) * has_scored_BK
        return torch.where(sampled_BK > 0, sampled_BK / (self.num_sampled * chance_BK).clamp(min=1e-12), 0.0)

    def _shares(self, batch: GroupedBatch, rows_R: Tensor, scored_RL: Tensor) -> Tensor:
        """Return how many tokens each scored one represents, [R, L] float32: its row's, over those that are scored."""
        num_scored_B = torch.zeros_like(batch.completion_lengths).index_add_(0, rows_R, scored_RL.sum(dim=1))
        return (self.sizes(batch) / num_scored_B)[rows_R][:, None].expand_as(scored_RL)


def _ranked(entropy_BK: Tensor, has_scored_BK: Tensor, num_taken: int, update: InnerUpdate) -> Tensor:
    """Take `num_taken` scored segments in the order of falling entropy, the update's share of it: [B, K] float32."""
    rank_BK = _ranks(entropy_BK, has_scored_BK)
    first = update.index * num_taken
    return ((rank_BK >= first) & (rank_BK < first + num_taken)).float()


def _ranks(entropy_BK: Tensor, has_scored_BK: Tensor) -> Tensor:
    """Rank the scored segments by falling entropy, [B, K] int64, 0 for the highest; -1 for the others."""
    order_BK = entropy_BK.masked_fill(~has_scored_BK, -torch.inf).argsort(dim=1, descending=True, stable=True)
    return torch.where(has_scored_BK, order_BK.argsort(dim=1), -1)


def _sample_uniformly(sample_keys: Tensor, has_scored_BK: Tensor, num_sampled: int, update: InnerUpdate) -> Tensor:
    """Sample `num_sampled` scored segments, or all, without replacement: [B, K] float32, inverse probability or 0."""
    segments_K = torch.arange(has_scored_BK.shape[1], device=has_scored_BK.device)
    luck_BK = uniform(sample_keys[:, None], update.index, CHOICE_KEY, segments_K).masked_fill(~has_scored_BK, torch.inf)
    is_sampled_BK = has_scored_BK & (luck_BK.argsort(dim=1).argsort(dim=1) < num_sampled)
    num_scored_B1 = has_scored_BK.sum(dim=1, keepdim=True)
    return is_sampled_BK * (num_scored_B1 / num_sampled).clamp(min=1.0)
