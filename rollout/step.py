"""One denoise step after its forward: choose slots to write and sample their tokens.

A slot is open if it may be written.

Shape letters: A active rows, K slots of the longest block, N open slots, M slots that are committed, U slots that were
predicted: fewer than N where rows shared a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.counter import uniform
from rollout.batch_state import RowState, on_device
from rollout.forwards import SlotLogits
from rollout.request import SamplingParams, Schedule
from rollout.schedules import BlockView, select
from rollout.token_sampling import Predictions, SampledTokens, SamplingDistribution, predictions, sample_tokens

_RANDOM_ORDER_KEY = 1


@dataclass(frozen=True, slots=True)
class CommittedTokens:
    """Sampled tokens and their record: [M] each, as in `Completion`."""

    tokens: Tensor
    steps: Tensor
    logp: Tensor
    logp_raw: Tensor
    entropy: Tensor
    distribution_entropy: Tensor


def sample_slots(
    predicted: Predictions,
    source_M: Tensor,
    params: Sequence[SamplingParams],
    rows: RowState,
    *,
    row_M: Tensor,
    slots_M: Tensor,
) -> SampledTokens:
    """Sample a token for each of some slots, by the row's draw for this step and slot.

    Args:
        predicted: the policy's predictions.
        source_M: the prediction of each slot.
        params: sampling parameters of each row.
        rows: state of each row.
        row_M: the row of each slot.
        slots_M: the slots, counted from each prompt's end.
    """
    if all(p.temperature == 0 for p in params):
        tokens_M = predicted.top_tokens(source_M)
        zeros_M = torch.zeros(tokens_M.shape, device=tokens_M.device)
        return SampledTokens(tokens=tokens_M, logp=zeros_M, distribution_entropy=zeros_M)
    distribution = SamplingDistribution(
        temperature=rows.temperature[row_M],
        top_p=rows.top_p[row_M],
        top_k=rows.top_k[row_M],
        is_truncated=any(p.top_p < 1 or p.top_k for p in params),
    )
    return sample_tokens(predicted, source_M, distribution, uniform(rows.draw_key[row_M], rows.step[row_M], slots_M))


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSlots:
    """The slots of each row's block, [A, K]."""

    columns: Tensor
    """Their columns in the canvas."""
    masked: Tensor
    """bool: masked slots, which can be committed."""
    editable: Tensor | None
    """bool: slots whose token can be replaced; None where no row uses token editing."""
    tokens: Tensor | None
    """Current tokens; None where no row uses token editing."""

    @property
    def open(self) -> Tensor:
        """bool: slots that may be written."""
        return self.masked if self.editable is None else self.masked | self.editable


class DenoiseStep:
    """The choices of one denoise step, from the policy's predictions."""

    def __init__(
        self,
        params: Sequence[SamplingParams],
        rows: RowState,
        block: BlockSlots,
        found: SlotLogits,
    ) -> None:
        """Compute the predictions of the open slots.

        Args:
            params: sampling parameters of each row.
            rows: state of each row.
            block: slots of each row's block.
            found: logits of the open slots, which are overwritten.
        """
        self._params, self._rows, self._block = params, rows, block
        self._index_N, self._source_N = found.index, found.source
        self._predicted = predictions(found.logits)
        self._slots_AK = block.columns - rows.prompt_length[:, None]
        self._sampled_N: SampledTokens | None = None
        if not all(p.logp_exact for p in params):
            self._sampled_N = self._sample(torch.arange(len(found.index), device=found.index.device))

    def select(self) -> tuple[Tensor, Tensor]:
        """Return the slots [A, K] to write, and those of them committed only to reach the minimum, as in `select`."""
        present = {p.schedule for p in self._params}
        entropy_AK = random_order_AK = None
        if Schedule.ENTROPY_BOUND in present:
            entropy_AK = self._grid(self._entropies()[self._source_N])
        if Schedule.RANDOM in present:
            rows = self._rows
            random_order_AK = uniform(rows.draw_key[:, None], rows.step[:, None], self._slots_AK, _RANDOM_ORDER_KEY)
        view = BlockView(
            masked=self._block.masked,
            confidence=self._grid(self._confidence()),
            entropy=entropy_AK,
            random_order=random_order_AK,
        )
        chosen_AK, fallback_AK = select(view, self._rows.schedules(), present)
        editable_AK, tokens_AK = self._block.editable, self._block.tokens
        if editable_AK is not None and tokens_AK is not None:
            chosen_AK |= editable_AK & self._is_surpassed(tokens_AK, view.confidence)
        return chosen_AK, fallback_AK

    def _is_surpassed(self, tokens_AK: Tensor, confidence_AK: Tensor) -> Tensor:
        """Return [A, K] bool: whether a different token is the most probable and above the threshold (LLaDA2.1)."""
        top_AK = tokens_AK.clone()
        top_AK.view(-1)[self._index_N] = self._predicted.top_tokens(self._source_N)
        return (confidence_AK > self._rows.log_editing_threshold[:, None]) & (top_AK != tokens_AK)

    def non_finite_rows(self) -> Tensor:
        """Return [A] bool: whether any prediction of the row is not finite."""
        is_finite_U = self._predicted.log_norm.isfinite()
        is_not_finite_AK = torch.zeros_like(self._block.masked)
        is_not_finite_AK.view(-1)[self._index_N] = ~is_finite_U[self._source_N]
        return is_not_finite_AK.any(dim=1)

    def sample(self, picked_M: Tensor) -> CommittedTokens:
        """Sample tokens for some of the open slots."""
        source_M = self._source_N[picked_M]
        sampled_M = self._sample(picked_M) if self._sampled_N is None else self._sampled_N.of(picked_M)
        return CommittedTokens(
            tokens=sampled_M.tokens,
            steps=self._rows.step[self._row_of(picked_M)],
            logp=sampled_M.logp,
            logp_raw=self._predicted.logp(source_M, sampled_M.tokens),
            entropy=self._entropy(source_M),
            distribution_entropy=sampled_M.distribution_entropy,
        )

    def _confidence(self) -> Tensor:
        """Return the slots' confidence: log-probability of the most probable token, or of the sampled one."""
        confidence_N = -self._predicted.log_norm[self._source_N]
        if self._sampled_N is None:
            return confidence_N
        samples_first_A = on_device([not p.logp_exact for p in self._params], confidence_N.device)
        sampled_first_N = samples_first_A[self._index_N // self._block.masked.shape[1]]
        return torch.where(sampled_first_N, self._predicted.logp(self._source_N, self._sampled_N.tokens), confidence_N)

    def _sample(self, picked_M: Tensor) -> SampledTokens:
        slots_M = self._slots_AK.flatten()[self._index_N[picked_M]]
        source_M = self._source_N[picked_M]
        return sample_slots(
            self._predicted, source_M, self._params, self._rows, row_M=self._row_of(picked_M), slots_M=slots_M
        )

    def _entropy(self, source_M: Tensor) -> Tensor:
        if len(source_M) <= len(self._predicted.log_norm):
            return self._predicted.entropy(source_M)
        # Rows that share a forward share its entropies.
        return self._entropies()[source_M]

    def _entropies(self) -> Tensor:
        """Return the [U] entropies of all predictions."""
        log_norm_U = self._predicted.log_norm
        return self._predicted.entropy(torch.arange(len(log_norm_U), device=log_norm_U.device))

    def _row_of(self, picked_M: Tensor) -> Tensor:
        return self._index_N[picked_M] // self._block.masked.shape[1]

    def _grid(self, values_N: Tensor) -> Tensor:
        """Scatter [N] values of the open slots to [A, K]; -inf elsewhere."""
        grid = torch.full(self._block.masked.shape, -torch.inf, device=values_N.device)
        grid.view(-1)[self._index_N] = values_N
        return grid
