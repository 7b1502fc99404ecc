"""Likelihoods in the states that the sampler went through: the canvas before a denoise step shows what was committed
before it and masks the rest.

With one segment for each step every token is scored in the very state that it was committed in: the product over
tokens is the exact likelihood of the trajectory (CJ-GRPO; over a sampler with blocks of one slot, JustGRPO, arXiv
2601.15165, and the autoregressive factorisation). Longer segments cost fewer forwards: d2's StepMerge (arXiv
2509.21474), of which one segment is diffu-GRPO's estimate, TraceRL's slices (arXiv 2509.06949), and LightningRL's
blocks (arXiv 2603.13319). Sampled segments cost fewer still and are weighted to stay unbiased (AGRPO).

Shape letters: B rows, L completion slots, R canvases, K segments of the row with the most.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator
from torch import Tensor

from learner.batch import GroupedBatch
from learner.counter import uniform
from learner.estimators.base import InnerUpdate, Probability, SamplerFacts, prompt_mask
from learner.estimators.terms import TOKEN, Corruption
from learner.estimators.views import Law

_CHOICE_KEY, _PROMPT_KEY = 21, 22


class TrajectoryConfig(BaseModel):
    """Canvases that the sampler went through, each scoring what was committed in the segment that begins with it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Literal["trajectory"] = "trajectory"
    """The estimator."""
    num_segments: PositiveInt | None = None
    """Segments that the denoise steps of a completion are cut into, equally long (d2: 8 or 16)."""
    steps_per_segment: PositiveInt | None = None
    """Or the denoise steps of a segment (TraceRL's shrink): 1 is exact."""
    blocks_per_segment: PositiveInt | None = None
    """Or the sampler's blocks of a segment: 1 scores each block in the state that it began in, whatever the number of
    steps it then took (LightningRL)."""
    num_sampled: PositiveInt | None = None
    """Segments of each completion that are drawn anew at every update, weighted to stay unbiased; null: all."""
    proposal: Literal["uniform", "entropy"] = "uniform"
    """What they are drawn by: all alike, or by the entropy of the tokens that they commit (AGRPO)."""
    only: Literal["all", "fallback", "uncertain"] = "all"
    """Tokens that are scored: all; those that a step committed only because it must commit one (ForkGRPO); or the
    `uncertain_share` of the highest entropy at commit (JustGRPO's fast variant)."""
    uncertain_share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of a completion's tokens that counts as uncertain."""
    law: Literal["softmax", "sampler"] = "softmax"
    """The distribution that tokens are scored under: the plain softmax, or the one that the sampler drew from, at its
    temperature and without the mask id."""
    weigh: Literal["loss", "value"] = "loss"
    """What the weight of a drawn segment multiplies: its share of the loss, or, where a ratio is of whole completions,
    its log-probability."""
    scores_order: bool = False
    """Score too which slots were committed, among all that the block still had masked (MAPG); for
    `objective.order_temperature`."""
    p_mask_prompt: Probability = 0.0
    """Probability that a prompt token is masked (d2: 0.15)."""
    requires_block_length: PositiveInt | None = None
    """Refuse a sampler with other blocks: with blocks of 1 the likelihood is the autoregressive one (JustGRPO)."""

    @model_validator(mode="after")
    def _one_length(self) -> TrajectoryConfig:
        given = (self.num_segments, self.steps_per_segment, self.blocks_per_segment)
        if sum(length is not None for length in given) != 1:
            raise ValueError("give one of num_segments, steps_per_segment and blocks_per_segment")
        return self

    def corrupt(self, batch: GroupedBatch, update: InnerUpdate, sampler: SamplerFacts) -> Corruption:
        """One canvas for each segment that commits a scored token."""
        segment_BL = self._segments(batch, sampler.block_length)
        scored_BL = batch.completion_mask() & (segment_BL >= 0) & self._counts(batch)
        num_segments = int(segment_BL.max().clamp(min=0)) + 1
        wanted_BK = torch.zeros(batch.num_rows, num_segments, dtype=torch.bool, device=segment_BL.device)
        rows_N, slots_N = scored_BL.nonzero(as_tuple=True)
        wanted_BK[rows_N, segment_BL[rows_N, slots_N]] = True
        importance_BK = self._drawn(batch, wanted_BK, segment_BL, update)
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
            importance=drawn_RL if self.weigh == "loss" else None,
            law=self._law(sampler),
        )

    def mask_key(self, update: InnerUpdate) -> int:
        """One set of canvases for all updates unless something is drawn."""
        return update.index if self.num_sampled is not None or self.p_mask_prompt > 0 else 0

    def sizes(self, batch: GroupedBatch) -> Tensor:
        """The text's tokens."""
        return batch.completion_lengths

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

    def _segments(self, batch: GroupedBatch, block_length: int) -> Tensor:
        """[B, L] int64 the segment that commits each slot, -1 where none does."""
        step_BL = batch.step_map
        if self.blocks_per_segment is not None:
            slots_L = torch.arange(batch.num_slots, device=step_BL.device)
            return torch.where(step_BL < 0, -1, slots_L // (self.blocks_per_segment * block_length))
        if self.steps_per_segment is not None:
            return torch.where(step_BL < 0, -1, step_BL // self.steps_per_segment)
        assert self.num_segments is not None, "one of the three is given"
        num_steps_B = step_BL.amax(dim=1, keepdim=True) + 1
        # Segment n begins at step floor(n * steps / segments), as d2's snapshots do.
        segment_BL = ((step_BL + 1) * self.num_segments - 1) // num_steps_B.clamp(min=1)
        return torch.where(step_BL < 0, -1, segment_BL)

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

    def _drawn(self, batch: GroupedBatch, wanted_BK: Tensor, segment_BL: Tensor, update: InnerUpdate) -> Tensor:
        """[B, K] float32 what each segment counts for: 1, or how often it is drawn over how often is expected."""
        if self.num_sampled is None:
            return wanted_BK.float()
        weight_BK = wanted_BK.float()
        if self.proposal == "entropy":
            entropy_BL = batch.commit_entropy * (batch.completion_mask() & (segment_BL >= 0))
            weight_BK = torch.zeros_like(weight_BK).scatter_add_(1, segment_BL.clamp(min=0), entropy_BL)
            # A certain segment can be drawn too, or the estimate would be biased.
            weight_BK = (weight_BK + 1e-2) * wanted_BK
        chance_BK = weight_BK / weight_BK.sum(dim=1, keepdim=True).clamp(min=1e-12)
        # Systematic draws: one uniform for each row, the others evenly behind it (low discrepancy).
        start_B = uniform(batch.sample_keys, update.index, _CHOICE_KEY)
        ends_BK = chance_BK.cumsum(dim=1) * self.num_sampled
        reached_BK = (ends_BK - start_B[:, None]).ceil().clamp(min=0, max=self.num_sampled)
        drawn_BK = reached_BK.diff(dim=1, prepend=torch.zeros_like(reached_BK[:, :1])) * wanted_BK
        return torch.where(drawn_BK > 0, drawn_BK / (self.num_sampled * chance_BK).clamp(min=1e-12), 0.0)
