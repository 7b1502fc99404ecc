"""Log-probabilities of wanted tokens, without ever holding the logits of all slots.

The head is much the widest matrix: the logits of a few thousand slots of a real vocabulary are gigabytes. It runs on
chunks of the slots, and where a gradient is needed each chunk's logits are computed again in the backward pass.

Shape letters: M slots that are scored, D width, V vocabulary, N wanted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_MOST_LOGITS = 2**24


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Tokens whose log-probability is wanted, and under which law."""

    slot: Tensor
    """[N] int64, ascending: which of the scored slots each is wanted at."""
    token: Tensor
    """[N] int64; -1 for the most probable one, the `mask_id` apart."""
    temperature: float = 1.0
    """Logits are divided by it."""
    mask_id: int = 0
    """The mask id."""
    excludes_mask_id: bool = False
    """Whether the law gives it no probability, as the sampler's does."""
    forbidden_ids: tuple[int, ...] = ()
    """Other ids to which it gives none."""
    has_top: bool = False
    """Whether some of the tokens are -1."""


def wanted_logps(head: Callable[[Tensor], Tensor], x_MD: Tensor, vocab_size: int, wanted: Wanted) -> Tensor:
    """[N] float32 log-probabilities, in nats."""
    rows = max(1, _MOST_LOGITS // vocab_size)
    if len(x_MD) <= rows:
        return _logps(head, x_MD, wanted.slot, wanted)
    first_M = torch.arange(0, len(x_MD) + rows, rows, device=x_MD.device)
    ends = torch.searchsorted(wanted.slot, first_M).tolist()
    parts = []
    for index, x_CD in enumerate(x_MD.split(rows)):
        inside = slice(ends[index], ends[index + 1])
        chunk = Wanted(
            slot=wanted.slot[inside] - index * rows,
            token=wanted.token[inside],
            temperature=wanted.temperature,
            mask_id=wanted.mask_id,
            excludes_mask_id=wanted.excludes_mask_id,
            forbidden_ids=wanted.forbidden_ids,
            has_top=wanted.has_top,
        )
        if torch.is_grad_enabled():
            parts.append(checkpoint(_logps, head, x_CD, chunk.slot, chunk, use_reentrant=False))
        else:
            parts.append(_logps(head, x_CD, chunk.slot, chunk))
    return torch.cat(parts)


def _logps(head: Callable[[Tensor], Tensor], x_CD: Tensor, slot_N: Tensor, wanted: Wanted) -> Tensor:
    logits_CV = head(x_CD).float()
    if wanted.temperature != 1.0:
        logits_CV = logits_CV / wanted.temperature
    mask_id = torch.tensor([wanted.mask_id], device=logits_CV.device)
    if wanted.excludes_mask_id:
        logits_CV = logits_CV.index_fill(1, mask_id, -torch.inf)
    if wanted.forbidden_ids:
        forbidden = torch.tensor(wanted.forbidden_ids, device=logits_CV.device)
        logits_CV = logits_CV.index_fill(1, forbidden, -torch.inf)
    picked_N = logits_CV[slot_N, wanted.token.clamp(min=0)]
    if wanted.has_top:
        top_C = logits_CV.index_fill(1, mask_id, -torch.inf).amax(dim=-1)
        picked_N = torch.where(wanted.token < 0, top_C[slot_N], picked_N)
    return picked_N - logits_CV.logsumexp(dim=-1)[slot_N]
