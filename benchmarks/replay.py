"""Replay of a completion: its log-probabilities recomputed by full forwards over its canvases.

The canvas of denoise step t is the completion with the slots of step t and later masked again. For an exact sampler
the result equals the recorded log-probabilities. For a sampler with a KV cache the difference is its mismatch.

Shape letters: T denoise steps, L columns of the canvas, C slots of the record, N committed slots, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.model.targets import query_grid
from learner.model.transformer import Transformer
from rollout.request import Completion, Request
from rollout.token_sampling import predictions, truncate

_CANVASES_AT_A_TIME = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """Recomputed records of a completion: [C] each, as in `Completion`; 0 for tokens fixed by the request."""

    logp: NDArray[np.float32]
    logp_raw: NDArray[np.float32]
    entropy: NDArray[np.float32]
    distribution_entropy: NDArray[np.float32]


@torch.inference_mode()
def replay(model: Transformer, request: Request, completion: Completion) -> Replayed:
    """Compute log-probabilities and entropies of a completion's tokens at the steps that committed them.

    Args:
        model: the policy to evaluate, usually the one that sampled the completion.
        request: the request of the completion.
        completion: the completion with its whole terminal block, since tokens after the end of text are context too.
    """
    device = next(model.parameters()).device
    step_C = torch.from_numpy(completion.step_map.astype(np.int64)).to(device)
    steps_N, slots_N = _in_order(step_C)
    records = torch.zeros(4, len(step_C), device=device)
    for first in range(0, completion.step_map.max(initial=-1) + 1, _CANVASES_AT_A_TIME):
        inside_N = (steps_N >= first) & (steps_N < first + _CANVASES_AT_A_TIME)
        steps_T = torch.arange(first, min(first + _CANVASES_AT_A_TIME, int(steps_N.max()) + 1), device=device)
        canvases_TL = _canvases(model, request, completion, steps_T)
        rows_N, asked_N = steps_N[inside_N] - first, slots_N[inside_N]
        logits_NV = _logits(model, request, canvases_TL, rows_N, asked_N)
        tokens_N = canvases_TL.new_tensor(completion.token_ids)[asked_N]
        records[:, asked_N] = torch.stack(_record(request, logits_NV, tokens_N))
    logp, logp_raw, entropy, distribution_entropy = records.cpu().numpy()
    return Replayed(logp=logp, logp_raw=logp_raw, entropy=entropy, distribution_entropy=distribution_entropy)


def _in_order(step_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return the steps and indices of the committed slots, sorted by step, then slot."""
    slots_N = (step_C >= 0).nonzero()[:, 0]
    order = step_C[slots_N].argsort(stable=True)
    return step_C[slots_N][order], slots_N[order]


def _canvases(model: Transformer, request: Request, completion: Completion, steps_T: Tensor) -> Tensor:
    """Rebuild the canvases [T, L] before the given steps."""
    device, start, num_denoised = steps_T.device, len(request.prompt_ids), len(completion.token_ids)
    final_L = torch.full((start + request.params.gen_length,), model.config.mask_token_id, device=device)
    final_L[:start] = torch.tensor(request.prompt_ids, device=device)
    for slot, token in request.fixed_tokens.items():
        final_L[start + slot] = token
    final_L[start : start + num_denoised] = torch.from_numpy(completion.token_ids.astype(np.int64)).to(device)
    step_L = torch.full_like(final_L, -1)
    step_L[start : start + num_denoised] = torch.from_numpy(completion.step_map.astype(np.int64)).to(device)
    return torch.where(step_L >= steps_T[:, None], model.config.mask_token_id, final_L)


def _logits(model: Transformer, request: Request, canvases_TL: Tensor, rows_N: Tensor, slots_N: Tensor) -> Tensor:
    start, width, params = len(request.prompt_ids), canvases_TL.shape[1], request.params
    grid = query_grid(rows_N * width + start + slots_N, len(canvases_TL), width)
    logits_NV = model(canvases_TL, None, *grid).float()
    if params.cfg_scale:
        blind_TL = canvases_TL.clone()
        blind_TL[:, :start] = model.config.mask_token_id
        logits_NV = torch.lerp(model(blind_TL, None, *grid).float(), logits_NV, 1 + params.cfg_scale)
    logits_NV[:, [model.config.mask_token_id, *params.forbidden_ids]] = -torch.inf
    return logits_NV


def _record(request: Request, logits_NV: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    params, predicted = request.params, predictions(logits_NV)
    everything_N = torch.arange(len(tokens_N), device=tokens_N.device)
    logp_raw_N, entropy_N = predicted.logp(everything_N, tokens_N), predicted.entropy(everything_N)
    if params.temperature == 0:
        return torch.zeros_like(logp_raw_N), logp_raw_N, entropy_N, torch.zeros_like(entropy_N)
    scaled_NV = predicted.shifted / params.temperature
    top_p_N, top_k_N = torch.full_like(logp_raw_N, params.top_p), torch.full_like(tokens_N, params.top_k)
    law_NV = truncate(scaled_NV, top_p_N, top_k_N).log_softmax(dim=-1)
    law_entropy_N = torch.special.entr(law_NV.exp()).sum(dim=-1)
    return law_NV.gather(1, tokens_N[:, None])[:, 0], logp_raw_N, entropy_N, law_entropy_N
