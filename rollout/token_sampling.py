"""Token sampling from logits: one pass of statistics, then an inverse CDF for each committed slot.

Shape letters: N slots, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 64
# Logits that a CPU processes at a time: with their exponentials they fit into its L2 cache.
_CPU_CHUNK = 1 << 17
_MIN_LOGIT = -1e4


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of the policy for N slots, as normalised logits."""

    shifted: Tensor
    """[N, V] float32 logits minus the largest of their row; -inf where a token is forbidden."""
    log_norm: Tensor
    """[N] log-sum-exp of `shifted`: minus the log-probability, in nats, of the most probable token."""

    def logp(self, slots_N: Tensor, tokens_N: Tensor) -> Tensor:
        """Return the log-probability, in nats, of one token at each of some slots."""
        return self.shifted[slots_N, tokens_N] - self.log_norm[slots_N]

    def top_tokens(self, slots_N: Tensor) -> Tensor:
        """Return the most probable token at each of some slots, the lowest id among equals."""
        if len(slots_N) < len(self.shifted):
            # The maximum is fast and the argmax is not, so the latter is computed for the requested slots only.
            return self.shifted[slots_N].argmax(dim=-1)
        return self.shifted.argmax(dim=-1)[slots_N]

    def entropy(self, slots_N: Tensor) -> Tensor:
        """Return the entropy, in nats, of the prediction at each of some slots."""
        shifted_NV, log_norm_N = self.shifted[slots_N], self.log_norm[slots_N]
        weights_NV = shifted_NV.exp()
        # A forbidden token adds nothing: its weight is 0, and clamping makes its logit finite (0 times -inf is NaN).
        mean_N = weights_NV.mul_(shifted_NV.clamp_(min=_MIN_LOGIT)).sum(dim=-1) * (-log_norm_N).exp()
        return log_norm_N - mean_N


def predictions(logits_NV: Tensor) -> Predictions:
    """Normalise each row of logits in float32. Overwrites float32 logits: they can be gigabytes."""
    shifted_NV = logits_NV.float()
    total_N = shifted_NV.new_empty(len(shifted_NV))
    # On a CPU in chunks: all rows at once would take four passes through main memory, and a tensor as large as the
    # logits.
    rows = max(1, _CPU_CHUNK // shifted_NV.shape[1]) if shifted_NV.device.type == "cpu" else max(1, len(shifted_NV))
    for some in range(0, len(shifted_NV), rows):
        chunk = slice(some, some + rows)
        weights = shifted_NV[chunk].sub_(shifted_NV[chunk].amax(dim=-1, keepdim=True)).exp()
        torch.sum(weights, dim=-1, out=total_N[chunk])
    return Predictions(shifted_NV, total_N.log_())


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDistribution:
    """Sampling distribution of each of N slots: temperature, top-p and top-k."""

    temperature: Tensor
    """[N] float32; 0 takes the most probable token."""
    top_p: Tensor
    """[N] float32, 1 for no limit."""
    top_k: Tensor
    """[N] int64, 0 for no limit."""
    is_truncated: bool
    """Whether any slot has a `top_p` or `top_k`."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens of N slots, with log-probabilities and entropies."""

    tokens: Tensor
    """[N] int64."""
    logp: Tensor
    """[N] log-probability, in nats, under the distribution that each was sampled from; 0 at temperature 0."""
    distribution_entropy: Tensor
    """[N] entropy, in nats, of that distribution; 0 at temperature 0."""

    def of(self, slots_M: Tensor) -> SampledTokens:
        """Select some of the slots."""
        return SampledTokens(self.tokens[slots_M], self.logp[slots_M], self.distribution_entropy[slots_M])


def sample_tokens(
    predicted: Predictions, slots_N: Tensor, distribution: SamplingDistribution, uniforms_N: Tensor
) -> SampledTokens:
    """Sample a token for each of some slots. Temperature 0 takes the most probable token.

    Args:
        predicted: the policy's predictions.
        slots_N: the slots, as indices into the predictions; they may repeat.
        distribution: the sampling distribution of each.
        uniforms_N: a number in (0, 1) for each, which determines its token.
    """
    is_greedy_N = distribution.temperature == 0
    scaled_NV = predicted.shifted[slots_N].div_(torch.where(is_greedy_N, 1.0, distribution.temperature)[:, None])
    if distribution.is_truncated:
        scaled_NV = truncate(scaled_NV, distribution.top_p, distribution.top_k)
    weights_NV = scaled_NV.exp()
    sampled_N, total_N = inverse_cdf(weights_NV, uniforms_N)
    log_norm_N = total_N.log().float()
    logp_N = scaled_NV.gather(1, sampled_N[:, None])[:, 0] - log_norm_N
    # A token that cannot be sampled adds nothing: its weight is 0, and clamping makes its logit finite.
    mean_N = weights_NV.mul_(scaled_NV.clamp_(min=_MIN_LOGIT)).sum(dim=-1) / total_N.float()
    return SampledTokens(
        tokens=torch.where(is_greedy_N, predicted.top_tokens(slots_N), sampled_N),
        logp=torch.where(is_greedy_N, 0.0, logp_N),
        distribution_entropy=torch.where(is_greedy_N, 0.0, log_norm_N - mean_N),
    )


def truncate(logits_NV: Tensor, top_p_N: Tensor, top_k_N: Tensor) -> Tensor:
    """Apply top-k and top-p (nucleus) truncation: set the logits of all other tokens to -inf."""
    sorted_NV, order_NV = logits_NV.sort(dim=-1, descending=True, stable=True)
    p_NV = sorted_NV.softmax(dim=-1)
    ranks_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    # A top_p of 1 keeps all tokens: by rounding, the running sum may reach 1 before the tail ends.
    keep_NV = (p_NV.cumsum(dim=-1) - p_NV < top_p_N[:, None]) | (top_p_N == 1)[:, None]
    keep_NV &= (ranks_V < top_k_N[:, None]) | (top_k_N == 0)[:, None]
    keep_NV[:, 0] = True
    return sorted_NV.masked_fill_(~keep_NV, -torch.inf).gather(1, order_NV.argsort(dim=-1))


def inverse_cdf(weights_NV: Tensor, uniforms_N: Tensor) -> tuple[Tensor, Tensor]:
    """Sample a token of each row by inverse CDF: where the running sum of its weights passes a share of their total.

    Two levels: chunks of the vocabulary first, then inside one chunk. Only the sums of chunks are added up over the
    whole vocabulary, in float64, so that the tail is not lost to rounding. A token of weight 0 is never sampled.

    Args:
        weights_NV: not negative, float32, with a positive sum in each row.
        uniforms_N: in (0, 1).

    Returns:
        tokens [N] int64, and the sums of the weights [N] float64.
    """
    chunks_NCK = F.pad(weights_NV, (0, -weights_NV.shape[1] % _CHUNK)).unflatten(1, (-1, _CHUNK))
    running_NC = chunks_NCK.sum(dim=-1).double().cumsum(dim=-1)
    total_N = running_NC[:, -1]
    target_N = uniforms_N.double() * total_N
    # NaN weights would index past the end. They are reported by the callers' checks of the predictions.
    chunk_N = torch.searchsorted(running_NC, target_N[:, None], right=True)[:, 0].clamp_(max=running_NC.shape[1] - 1)
    inside_NK = chunks_NCK[torch.arange(len(chunk_N), device=chunk_N.device), chunk_N].double()
    below_N = F.pad(running_NC, (1, 0)).gather(1, chunk_N[:, None])[:, 0]
    inner_NK = inside_NK.cumsum(dim=-1)
    # By rounding, the sum of the chunk can be smaller than the share that is left for it.
    largest_N = torch.nextafter(inner_NK[:, -1], torch.zeros_like(total_N))
    place_N = torch.searchsorted(inner_NK, torch.minimum(target_N - below_N, largest_N)[:, None], right=True)[:, 0]
    return (chunk_N * _CHUNK + place_N).clamp_(max=weights_NV.shape[1] - 1), total_N
