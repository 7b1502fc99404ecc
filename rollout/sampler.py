"""The diffusion sampler: a batch of masked canvases, denoised block by block.

The order is LLaDA's (low-confidence remasking, semi-autoregressive blocks, arXiv 2502.09992 appendix B): each step
predicts every masked slot of the block and commits the most confident ones. Positions are selected first, by the
probability of their most probable token, and only those are sampled: a committed token is then a draw from
softmax(logits / T) and its recorded log-probability is the law of that draw. (LLaDA and d1 sample everywhere and
commit the slots whose *sample* is probable, which is no draw from softmax; at temperature 0 the two agree.)

Shape letters: B rows, P longest prompt, C completion slots, K slots of a block, N scored slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.counter import uniform
from learner.model.transformer import Transformer
from rollout.request import Completion, FinishReason, Request, SamplingParams


@dataclass(slots=True)
class _Canvases:
    """The state of a batch. Row b is prompt b, its completion slots, then padding."""

    rows: list[int]
    """[B] index of each row's request."""
    seeds: Tensor
    """[B] int64."""
    prompt_lengths: Tensor
    """[B] int64."""
    tokens: Tensor
    """[B, P + C] token ids."""
    step_map: Tensor
    """[B, C] int64, -1 for a masked slot."""
    logp: Tensor
    """[B, C] float32; likewise the next two. As in `Completion`."""
    logp_raw: Tensor
    entropy: Tensor

    def keep(self, kept: Tensor) -> None:
        """Drop finished rows; those that remain see no difference."""
        self.rows = [row for row, keep in zip(self.rows, kept.tolist(), strict=True) if keep]
        self.seeds, self.prompt_lengths = self.seeds[kept], self.prompt_lengths[kept]
        self.tokens, self.step_map = self.tokens[kept], self.step_map[kept]
        self.logp, self.logp_raw = self.logp[kept], self.logp_raw[kept]
        self.entropy = self.entropy[kept]


class Sampler:
    """Samples completions from one policy version."""

    def __init__(self, model: Transformer, policy_version: int) -> None:
        self.model = model
        self.policy_version = policy_version
        self._device = next(model.parameters()).device

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions of `requests`, in their order. All requests share their sampling params.

        A row leaves the batch after the block in which it commits an end of text.
        Raises ValueError when a canvas is longer than the model allows.
        """
        params = requests[0].params
        assert all(request.params == params for request in requests), "a batch has one set of sampling params"
        canvases = self._open(requests, params)
        completions: dict[int, Completion] = {}
        for block in range(params.num_blocks):
            self._denoise_block(canvases, params, block)
            num_denoised = (block + 1) * params.block_length
            done_B = self._has_eos(canvases, num_denoised) | (block + 1 == params.num_blocks)
            for index in done_B.nonzero()[:, 0].tolist():
                completions[canvases.rows[index]] = self._record(canvases, params, index, block + 1)
            if done_B.all():
                break
            canvases.keep(~done_B)
        return [completions[index] for index in range(len(requests))]

    def _open(self, requests: Sequence[Request], params: SamplingParams) -> _Canvases:
        lengths = [len(request.prompt_ids) for request in requests]
        width = max(lengths) + params.gen_length
        config = self.model.config
        tokens = np.full((len(requests), width), config.pad_token_id, dtype=np.int64)
        for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            tokens[row, :length] = request.prompt_ids
            tokens[row, length : length + params.gen_length] = config.mask_token_id
        shape = (len(requests), params.gen_length)
        return _Canvases(
            rows=list(range(len(requests))),
            seeds=torch.tensor([request.seed for request in requests], dtype=torch.int64, device=self._device),
            prompt_lengths=torch.tensor(lengths, device=self._device),
            tokens=torch.from_numpy(tokens).to(self._device),
            step_map=torch.full(shape, -1, dtype=torch.int64, device=self._device),
            logp=torch.zeros(shape, device=self._device),
            logp_raw=torch.zeros(shape, device=self._device),
            entropy=torch.zeros(shape, device=self._device),
        )

    def _denoise_block(self, canvases: _Canvases, params: SamplingParams, block: int) -> None:
        """Commit every slot of one block, in `steps_per_block` forwards."""
        quotas = commit_quotas(params.block_length, params.steps_per_block)
        start = block * params.block_length
        slots_K = torch.arange(start, start + params.block_length, device=self._device)
        positions_BK = canvases.prompt_lengths[:, None] + slots_K
        num_masked = params.block_length
        for step_in_block, quota in enumerate(quotas):
            step = block * params.steps_per_block + step_in_block
            rows_N, columns_N = (canvases.step_map[:, slots_K] < 0).nonzero(as_tuple=True)
            logits_NV = self._logits(canvases, step, rows_N, positions_BK[rows_N, columns_N])
            log_norm_N = logits_NV.logsumexp(dim=-1)
            confidence_BM = (logits_NV.amax(dim=-1) - log_norm_N).view(-1, num_masked)
            # Stable: equal confidences, common in low precision, go to the leftmost slot.
            chosen_BQ = confidence_BM.sort(dim=-1, descending=True, stable=True).indices[:, :quota]
            offsets_B = torch.arange(len(canvases.rows), device=self._device)[:, None] * num_masked
            chosen_N = (offsets_B + chosen_BQ).flatten()
            where = rows_N[chosen_N], slots_K[columns_N[chosen_N]]
            self._commit(canvases, where, logits_NV[chosen_N], step, params.temperature)
            num_masked -= quota

    def _logits(self, canvases: _Canvases, step: int, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        """Float32 logits [N, V] of the asked slots; the mask id is impossible."""
        tokens, width = canvases.tokens, canvases.tokens.shape[1]
        lengths_B = canvases.prompt_lengths + canvases.step_map.shape[1]
        if step:
            slots_N, copies_N = rows_N * width + positions_N, None
        else:
            # Before the first commit the rows of a group are equal: one forward serves them all.
            tokens, row_B = tokens.unique(dim=0, return_inverse=True)
            lengths_B = lengths_B.new_zeros(len(tokens)).scatter_(0, row_B, lengths_B)
            slots_N, copies_N = (row_B[rows_N] * width + positions_N).unique(return_inverse=True)
        is_ragged = bool((lengths_B != width).any())
        logits_NV = self.model(tokens, lengths_B if is_ragged else None, slots_N).float()
        logits_NV[:, self.model.config.mask_token_id] = -torch.inf
        return logits_NV if copies_N is None else logits_NV[copies_N]

    def _commit(
        self, canvases: _Canvases, where: tuple[Tensor, Tensor], logits_NV: Tensor, step: int, temperature: float
    ) -> None:
        """Draw a token for each selected (row, slot) and record how."""
        rows_N, slots_N = where
        uniforms_N = uniform(canvases.seeds[rows_N], step, slots_N)
        tokens_N, logp_N = draw(logits_NV, temperature, uniforms_N)
        logp_raw_NV = logits_NV.log_softmax(dim=-1)
        entropy_N = torch.special.entr(logp_raw_NV.exp()).sum(dim=-1)
        canvases.tokens[rows_N, canvases.prompt_lengths[rows_N] + slots_N] = tokens_N
        canvases.step_map[rows_N, slots_N] = step
        canvases.logp[rows_N, slots_N] = logp_N
        canvases.logp_raw[rows_N, slots_N] = logp_raw_NV.gather(1, tokens_N[:, None])[:, 0]
        canvases.entropy[rows_N, slots_N] = entropy_N

    def _completion_ids(self, canvases: _Canvases, num_slots: int) -> Tensor:
        slots_C = torch.arange(num_slots, device=self._device)
        return canvases.tokens.gather(1, canvases.prompt_lengths[:, None] + slots_C)

    def _has_eos(self, canvases: _Canvases, num_slots: int) -> Tensor:
        return (self._completion_ids(canvases, num_slots) == self.model.config.eos_token_id).any(dim=1)

    def _record(self, canvases: _Canvases, params: SamplingParams, index: int, num_blocks: int) -> Completion:
        num_slots = num_blocks * params.block_length
        start = int(canvases.prompt_lengths[index])
        token_ids = canvases.tokens[index, start : start + num_slots]
        eos = (token_ids == self.model.config.eos_token_id).nonzero()[:, 0]
        return Completion(
            token_ids=token_ids.cpu().numpy().astype(np.int32),
            num_tokens=int(eos[0]) + 1 if len(eos) else num_slots,
            step_map=canvases.step_map[index, :num_slots].cpu().numpy().astype(np.int16),
            commit_logp=canvases.logp[index, :num_slots].cpu().numpy(),
            commit_logp_raw=canvases.logp_raw[index, :num_slots].cpu().numpy(),
            commit_entropy=canvases.entropy[index, :num_slots].cpu().numpy(),
            num_forwards=num_blocks * params.steps_per_block,
            exact=True,
            finish_reason=FinishReason.EOS if len(eos) else FinishReason.LENGTH,
            policy_version=self.policy_version,
        )


def commit_quotas(num_slots: int, num_steps: int) -> list[int]:
    """Slots to commit at each of `num_steps` steps: an even share, the remainder to the earliest (LLaDA)."""
    share, remainder = divmod(num_slots, num_steps)
    return [share + (step < remainder) for step in range(num_steps)]


def draw(logits_NV: Tensor, temperature: float, uniforms_N: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each row's softmax(logits / temperature) by inverse CDF, and its log-probability in nats.

    Temperature 0 is the most probable token (the lowest id among equals), with log-probability 0.
    The sum runs in float64: a float32 sum over a large vocabulary loses the tail.
    """
    if temperature == 0:
        tokens_N = logits_NV.argmax(dim=-1)
        return tokens_N, torch.zeros_like(uniforms_N)
    logp_NV = (logits_NV / temperature).log_softmax(dim=-1)
    cdf_NV = logp_NV.double().exp().cumsum(dim=-1)
    targets_N = uniforms_N.double() * cdf_NV[:, -1]
    tokens_N = torch.searchsorted(cdf_NV, targets_N[:, None], right=True)[:, 0]
    return tokens_N, logp_NV.gather(1, tokens_N[:, None])[:, 0]
