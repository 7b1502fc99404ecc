"""Likelihoods in the states that the sampler went through: the canvas before a denoise step shows what was committed
before it and masks the rest.

With one segment for each step every token is scored in the very state that it was committed in: the product over
tokens is the exact likelihood of the trajectory (CJ-GRPO; over a sampler with blocks of one slot, JustGRPO, arXiv
2601.15165, and the autoregressive factorisation). Longer segments cost fewer forwards: d2's StepMerge (arXiv
2509.21474), of which one segment is diffu-GRPO's estimate, and TraceRL's slices (arXiv 2509.06949). Sampled segments
cost fewer still and are weighted to stay unbiased (AGRPO).

Shape letters: B rows, L completion slots, R canvases, K segments of the row with the most.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator
from torch import Tensor

from learner.batch import GroupedBatch
from learner.counter import uniform
from learner.estimators.base import InnerUpdate, Probability, SamplerFacts, Slots, covered, prompt_mask
from learner.estimators.terms import TOKEN, Corruption
from learner.estimators.views import Law

CHOICE_KEY, _PROMPT_KEY = 21, 22
_LEAST_ENTROPY = 1e-2


class TrajectoryConfig(BaseModel):
    """Canvases that the sampler went through, each scoring what was committed in the segment that begins with it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Literal["trajectory"] = "trajectory"
    """The estimator."""
    num_segments: PositiveInt | None = None
    """Segments that the denoise steps of a completion are cut into, equally long (d2: 8 or 16)."""
    steps_per_segment: PositiveInt | None = None
    """Or the denoise steps of a segment (TraceRL's shrink): 1 is exact."""
    num_sampled: PositiveInt | None = None
    """Segments of each completion that are drawn anew at every update, weighted to stay unbiased; null: all."""
    proposal: Literal["uniform", "entropy"] = "uniform"
    """What they are drawn by: all alike, or by the entropy of what their tokens were drawn from (AGRPO)."""
    slots: Literal["text", "denoised"] = "text"
    """Whose tokens are scored: the text's, up to and including its first end of text; or those of all slots that were
    denoised, in the steps up to the last that commits anything but an end of text (AGRPO)."""
    only: Literal["all", "fallback", "uncertain"] = "all"
    """Tokens that are scored: all; those that a step committed only because it must commit one (ForkGRPO); or the
    `uncertain_share` of the highest entropy at commit (JustGRPO's fast variant)."""
    uncertain_share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of a completion's tokens that counts as uncertain."""
    law: Literal["softmax", "sampler"] = "softmax"
    """The distribution that tokens are scored under: the plain softmax, or the one that the sampler drew from, at its
    temperature and without the mask id."""
    weigh: Literal["loss", "mean", "value"] = "loss"
    """What a drawn segment stands for: its share in the sum of all segments' losses, or in their mean (AGRPO); or,
    where a ratio is of whole completions, in the sum of their log-probabilities."""
    scores_order: bool = False
    """Score too which slots were committed, among all that the block still had masked (MAPG); for
    `objective.order_temperature`."""
    p_mask_prompt: Probability = 0.0
    """Probability that a prompt token is masked (d2: 0.15)."""
    requires_block_length: PositiveInt | None = None
    """Refuse a sampler with other blocks: with blocks of 1 the likelihood is the autoregressive one (JustGRPO)."""

    @model_validator(mode="after")
    def _one_length(self) -> TrajectoryConfig:
        if (self.num_segments is None) == (self.steps_per_segment is None):
            raise ValueError("give either num_segments or steps_per_segment")
        return self

    def corrupt(self, batch: GroupedBatch, update: InnerUpdate, sampler: SamplerFacts) -> Corruption:
        """One canvas for each segment that commits a scored token."""
        segment_BL = self._segments(batch)
        covered_BL = self._covered(batch)
        scored_BL = covered_BL & self._counts(batch)
        num_segments = int(segment_BL.max().clamp(min=0)) + 1
        wanted_BK = torch.zeros(batch.num_rows, num_segments, dtype=torch.bool, device=segment_BL.device)
        rows_N, slots_N = scored_BL.nonzero(as_tuple=True)
        wanted_BK[rows_N, segment_BL[rows_N, slots_N]] = True
        entropy_BK = torch.zeros_like(wanted_BK, dtype=torch.float32)
        entropy_BK.scatter_add_(1, segment_BL.clamp(min=0), batch.commit_law_entropy * covered_BL)
        importance_BK = self._drawn(batch, wanted_BK, entropy_BK, update)
        if self.weigh == "mean":
            importance_BK = importance_BK / wanted_BK.sum(dim=1, keepdim=True).clamp(min=1)
        rows_R, parts_R = (importance_BK > 0).nonzero(as_tuple=True)
        segment_RL = segment_BL[rows_R]
        prompt_BP = prompt_mask(batch, self.p_mask_prompt, _PROMPT_KEY, self.mask_key(update))
        is_committed_RL = segment_RL == parts_R[:, None]
        scored_RL = scored_BL[rows_R] & is_committed_RL
        # What was never committed, after the last block that was denoised, is masked throughout.
        masked_RL = (segment_RL >= parts_R[:, None]) | (segment_RL < 0)
        drawn_RL = importance_BK[rows_R, parts_R][:, None].expand_as(scored_RL)
        places_RL = sets_RL = None
        if self.scores_order:
            places_RL, sets_RL = self._order(batch.step_map[rows_R], is_committed_RL, masked_RL, sampler.block_length)
            sets_RL = sets_RL + parts_R[:, None] * batch.num_slots
        return Corruption(
            rows=rows_R,
            masked=masked_RL,
            scored=scored_RL,
            places=places_RL,
            sets=sets_RL,
            prompt_masked=None if prompt_BP is None else prompt_BP[rows_R],
            parts=parts_R,
            weights=drawn_RL if self.weigh == "value" else None,
            importance=None if self.weigh == "value" else drawn_RL,
            law=self._law(sampler),
        )

    def mask_key(self, update: InnerUpdate) -> int:
        """One set of canvases for all updates unless something is drawn."""
        return update.index if self.num_sampled is not None or self.p_mask_prompt > 0 else 0

    def sizes(self, batch: GroupedBatch) -> Tensor:
        """The tokens that may be scored."""
        return batch.completion_lengths if self.slots == "text" else self._covered(batch).sum(dim=1)

    def refusal(self, sampler: SamplerFacts) -> str | None:
        """Fallback tokens must be told apart."""
        if self.only == "fallback" and not sampler.has_fallback:
            return "estimator.only is fallback; the sampler's schedule never falls back: set rollout.sampling.threshold"
        if self.requires_block_length not in (None, sampler.block_length):
            return (
                f"estimator.requires_block_length is {self.requires_block_length}; "
                f"rollout.sampling.block_length is {sampler.block_length} and must be the same"
            )
        return None

    @property
    def is_exact(self) -> bool:
        """Whether each token is scored in the state, and under the law, that it was committed in."""
        return self.steps_per_segment == 1 and self.law == "sampler" and self.p_mask_prompt == 0

    def _law(self, sampler: SamplerFacts) -> Law:
        if self.law == "softmax":
            return Law(has_top=self.scores_order)
        return Law(
            temperature=sampler.temperature or 1.0,
            excludes_mask_id=True,
            forbidden_ids=sampler.forbidden_ids,
            has_top=self.scores_order,
        )

    @staticmethod
    def _order(step_RL: Tensor, is_committed_RL: Tensor, masked_RL: Tensor, block_length: int) -> tuple[Tensor, Tensor]:
        """[R, L] places and [R, L] blocks: in each block that a segment commits to, all slots that were masked."""
        block_L = torch.arange(step_RL.shape[1], device=step_RL.device) // block_length
        block_RL = block_L.expand_as(step_RL)
        num_blocks = int(block_L.max()) + 1
        is_active_RW = torch.zeros(len(step_RL), num_blocks, device=step_RL.device)
        is_active_RW = is_active_RW.scatter_add_(1, block_RL, is_committed_RL.float()) > 0
        is_ranked_RL = masked_RL & is_active_RW.gather(1, block_RL)
        return torch.where(is_ranked_RL, torch.where(is_committed_RL, step_RL, -1), TOKEN), block_RL

    def _segments(self, batch: GroupedBatch) -> Tensor:
        """[B, L] int64 the segment that commits each slot, -1 where none does."""
        step_BL = batch.step_map
        if self.steps_per_segment is not None:
            return torch.where(step_BL < 0, -1, step_BL // self.steps_per_segment)
        assert self.num_segments is not None, "one of the two is given"
        num_steps_B = step_BL.amax(dim=1, keepdim=True) + 1
        # Segment n begins at step floor(n * steps / segments), as d2's snapshots do.
        segment_BL = ((step_BL + 1) * self.num_segments - 1) // num_steps_B.clamp(min=1)
        return torch.where(step_BL < 0, -1, segment_BL)

    def _covered(self, batch: GroupedBatch) -> Tensor:
        """[B, L] bool: the committed slots of the text, or of the steps up to the last that says something."""
        if self.slots == "text":
            return batch.completion_mask() & (batch.step_map >= 0)
        last_B1 = (batch.completion_lengths - 1).clamp(min=0)[:, None]
        # A text that was not cut off ends in the token that ends texts.
        is_end_BL = (batch.completion_ids == batch.completion_ids.gather(1, last_B1)) & ~batch.truncated[:, None]
        last_step_B1 = batch.step_map.masked_fill(is_end_BL, -1).amax(dim=1, keepdim=True)
        return covered(batch, Slots.DENOISED) & (batch.step_map <= last_step_B1)

    def _counts(self, batch: GroupedBatch) -> Tensor:
        """[B, L] bool: the tokens that are scored, as far as `only` goes."""
        if self.only == "all":
            return torch.ones_like(batch.fallback)
        if self.only == "fallback":
            return batch.fallback
        is_text = batch.completion_mask()
        entropy_BL = batch.commit_entropy.masked_fill(~is_text, -torch.inf)
        rank_BL = entropy_BL.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        kept_B = (batch.completion_lengths * self.uncertain_share).ceil().long()
        return is_text & (rank_BL < kept_B[:, None])

    def _drawn(self, batch: GroupedBatch, wanted_BK: Tensor, entropy_BK: Tensor, update: InnerUpdate) -> Tensor:
        """[B, K] float32 what each segment counts for: 1, or how often it is drawn over how often is expected."""
        if self.num_sampled is None:
            return wanted_BK.float()
        weight_BK = wanted_BK.float()
        if self.proposal == "entropy":
            # A certain segment can be drawn too, or the estimate would be biased; and with no weight that swamps all
            # others, whose bound this is.
            weight_BK = (entropy_BK + _LEAST_ENTROPY) * wanted_BK
        chance_BK = weight_BK / weight_BK.sum(dim=1, keepdim=True).clamp(min=1e-12)
        # Systematic draws: one uniform for each row, the others evenly behind it (low discrepancy).
        start_B = uniform(batch.sample_keys, update.index, CHOICE_KEY)
        ends_BK = chance_BK.cumsum(dim=1) * self.num_sampled
        reached_BK = (ends_BK - start_B[:, None]).ceil().clamp(min=0, max=self.num_sampled)
        drawn_BK = reached_BK.diff(dim=1, prepend=torch.zeros_like(reached_BK[:, :1])) * wanted_BK
        return torch.where(drawn_BK > 0, drawn_BK / (self.num_sampled * chance_BK).clamp(min=1e-12), 0.0)
