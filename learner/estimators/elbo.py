"""The ELBO estimator: the evidence lower bound of a completion, from random masks of many ratios.

With k of L slots masked at random, L / k times the sum of the masked tokens' log-probabilities is, in expectation over
k uniform on 1..L, the ELBO (LLaDA, arXiv 2502.09992, equation 6). Methods differ in how they sample k. ESPO (arXiv
2512.03759) stratifies it over the completions of a group and runs each mask with its complement. GDPO (arXiv
2510.08554) takes quadrature nodes. BGPO (arXiv 2510.11683) and VRPO (arXiv 2505.19223) spread the draws of a completion
evenly. EBPO (arXiv 2602.08676) does so in every block of a block-causal policy.

Shape letters: B rows, L completion slots, R canvases, D draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator

from learner.batch import GroupedBatch
from learner.counter import uniform
from learner.estimators.base import (
    EstimatorFacts,
    InnerUpdate,
    RowValue,
    SamplerFacts,
    ScoredSlots,
    covered_slots,
    repeat_rows,
)
from learner.estimators.block_noise import block_noise
from learner.estimators.terms import Corruption
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

_COUNT_KEY, _MASK_KEY = 41, 42
_MIN_RATIO = 0.1


class MaskCounts(StrEnum):
    """How the number of masked slots is sampled."""

    GROUP = "group"
    """Spread evenly over the completions of a group, from another start for each draw (ESPO)."""
    ROW = "row"
    """Spread evenly over the draws of a completion (BGPO, VRPO)."""
    QUADRATURE = "quadrature"
    """The nodes of the Gauss-Legendre rule on [0, 1], with their weights (GDPO)."""
    RATIO = "ratio"
    """Each slot is masked with probability t, uniform on [0.1, 1]; the sum is divided by the share masked (DMPO)."""
    BLOCK = "block"
    """A count for every block of a block-causal policy, at noise levels spread evenly over the draws (EBPO). Under a
    bidirectional policy the completion is one block."""


class ElboConfig(BaseModel):
    """Config of the ELBO estimator."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Literal["elbo"] = "elbo"
    """The estimator."""
    num_draws: PositiveInt = 2
    """Masks per completion."""
    counts: MaskCounts = MaskCounts.GROUP
    """How the number of masked slots is sampled."""
    complement: bool = True
    """Run the complement of each mask too, so that every slot is scored exactly once per draw."""
    slots: ScoredSlots = ScoredSlots.DENOISED
    """The slots that the likelihood covers."""
    masks: Literal["each_update", "fixed"] = "each_update"
    """Sample new masks at every update, or once per round."""
    values: Literal["mean", "draws"] = "mean"
    """Whether the draws are averaged, or each is a separate estimate (for `linear_bound`)."""

    @model_validator(mode="after")
    def _complete(self) -> ElboConfig:
        if self.complement and self.counts in (MaskCounts.QUADRATURE, MaskCounts.BLOCK):
            raise ValueError(f"counts: {self.counts} has no complements: set complement to false")
        return self

    @property
    def facts(self) -> EstimatorFacts:
        """All draws together, or each of them, bound the log-likelihood of a completion."""
        return EstimatorFacts(
            row_value=RowValue.ELBO,
            has_separate_draws=self.values == "draws",
            splits_tokens=self.num_draws > 1,
            splits_rows=self.num_draws > 1,
        )

    def corrupt(self, batch: GroupedBatch, update: InnerUpdate, sampler: SamplerFacts) -> Corruption:
        """Return `num_draws` canvases per row, twice as many with complements."""
        if self.counts is MaskCounts.BLOCK:
            return self._of_blocks(batch, self.mask_key(update), sampler)
        draws = self._draws(batch, self.mask_key(update))
        weights_R = self._weights(draws) / (1 if self.values == "draws" else self.num_draws)
        if not self.complement:
            # Slots that are not covered are shown.
            return Corruption(
                rows=draws.rows,
                masked=draws.masked,
                scored=draws.masked,
                parts=draws.numbers,
                weights=weights_R[:, None].expand(draws.masked.shape),
            )
        other = draws.complement()
        others_R = self._weights(other) / (1 if self.values == "draws" else self.num_draws)
        masked = torch.stack((draws.masked, other.masked), dim=1).flatten(0, 1)
        return Corruption(
            rows=draws.rows.repeat_interleave(2),
            masked=masked,
            scored=masked,
            parts=draws.numbers.repeat_interleave(2),
            weights=torch.stack((weights_R, others_R), dim=1).flatten()[:, None].expand(masked.shape) / 2,
        )

    def mask_key(self, update: InnerUpdate) -> int:
        """Return 0 if masks are fixed, else the index of the update."""
        return 0 if self.masks == "fixed" else update.index

    def sizes(self, batch: GroupedBatch) -> Tensor:
        """Return the number of covered slots, [B]."""
        return covered_slots(batch, self.slots).sum(dim=1)

    def incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return None: it needs only the tokens, of any sampler."""
        return None

    def _of_blocks(self, batch: GroupedBatch, key: int, sampler: SamplerFacts) -> Corruption:
        rows_R, numbers_R = repeat_rows(batch, self.num_draws)
        block_BL = sampler.blocks(batch) if sampler.is_block_causal else torch.zeros_like(batch.completion_ids)
        noise = block_noise(
            covered_slots(batch, self.slots)[rows_R],
            block_BL[rows_R],
            self._noise(batch, rows_R, numbers_R, key),
            (numbers_R, self.num_draws),
            uniform(batch.sample_keys[rows_R], key, _COUNT_KEY),
        )
        return Corruption(
            rows=rows_R,
            masked=noise.masked,
            scored=noise.masked,
            parts=numbers_R,
            weights=noise.weights / (1 if self.values == "draws" else self.num_draws),
        )

    def _noise(self, batch: GroupedBatch, rows_R: Tensor, numbers_R: Tensor, key: int) -> Tensor:
        """Draw noise for each slot, [R, L]; the slots with the smallest are masked."""
        slots_L = torch.arange(batch.num_slots, device=rows_R.device)
        return uniform(batch.sample_keys[rows_R, None], key, _MASK_KEY, numbers_R[:, None], slots_L)

    def _draws(self, batch: GroupedBatch, key: int) -> _Draws:
        rows_R, numbers_R = repeat_rows(batch, self.num_draws)
        covered_RL = covered_slots(batch, self.slots)[rows_R]
        noise_RL = self._noise(batch, rows_R, numbers_R, key)
        noise_RL = noise_RL.masked_fill(~covered_RL, 2.0)
        if self.counts is MaskCounts.RATIO:
            ratio_R = _MIN_RATIO + (1 - _MIN_RATIO) * uniform(batch.sample_keys[rows_R], key, _COUNT_KEY, numbers_R)
            masked_RL = noise_RL < ratio_R[:, None]
        else:
            # Slots with the smallest noise are masked; uncovered ones sort last.
            count_R = self._counts(batch, rows_R, numbers_R, key)
            masked_RL = covered_RL & (noise_RL.argsort(dim=1).argsort(dim=1) < count_R[:, None])
        return _Draws(rows=rows_R, numbers=numbers_R, covered=covered_RL, masked=masked_RL)

    def _counts(self, batch: GroupedBatch, rows_R: Tensor, numbers_R: Tensor, key: int) -> Tensor:
        """Return the number of masked slots, [R]."""
        size_R = covered_slots(batch, self.slots).sum(dim=1)[rows_R]
        if self.counts is MaskCounts.QUADRATURE:
            return (_rule(self.num_draws, rows_R.device)[0][numbers_R] * size_R).floor().long()
        if self.counts is MaskCounts.GROUP:
            start_R = uniform(batch.group_keys[rows_R], key, _COUNT_KEY, numbers_R)
            place_R = (start_R + batch.group_places[rows_R] / batch.group_sizes[rows_R]) % 1
        else:
            start_R = uniform(batch.sample_keys[rows_R], key, _COUNT_KEY)
            place_R = (start_R + numbers_R / self.num_draws) % 1
        if self.complement:
            return (place_R * (size_R + 1)).floor().long()
        return 1 + (place_R * size_R).floor().long().clamp(max=size_R - 1)

    def _weights(self, draws: _Draws) -> Tensor:
        """Return the factor of a draw's masked log-probabilities in the ELBO estimate, [R]."""
        size_R, count_R = draws.covered.sum(dim=1), draws.masked.sum(dim=1).clamp(min=1)
        if self.counts is MaskCounts.QUADRATURE:
            nodes, weights = _rule(self.num_draws, size_R.device)
            # The caller averages the draws, and a rule's weights already sum to 1.
            return weights[draws.numbers] / nodes[draws.numbers] * self.num_draws
        # With complements counts are 0 to L, and 0 scores nothing: L + 1 keeps the mean unbiased (ESPO).
        return (size_R + 1 if self.complement and self.counts is not MaskCounts.RATIO else size_R) / count_R


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draws:
    """Masks of the rows."""

    rows: Tensor
    """[R]."""
    numbers: Tensor
    """[R] the number of each draw within its row."""
    covered: Tensor
    """[R, L] bool: the slots that the likelihood covers."""
    masked: Tensor
    """[R, L] bool."""

    def complement(self) -> _Draws:
        """Mask the other covered slots instead."""
        return replace(self, masked=self.covered & ~self.masked)


def _rule(num_nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of the Gauss-Legendre rule on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    return (
        torch.tensor((nodes + 1) / 2, dtype=torch.float32, device=device),
        torch.tensor(weights / 2, dtype=torch.float32, device=device),
    )
