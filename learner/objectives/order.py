"""Log-probability of the commit order: that a slot is committed before its rivals (MAPG).

A sampler commits the slots with the highest confidence. A softmax over a committed token's logit and the highest logit
of each slot left masked models that choice (Mask-Aware Policy Gradients, arXiv 2607.15200; its code).

Shape letters: N terms, C canvases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from learner.estimators.groupings import Level
from learner.estimators.terms import Terms
from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor

_NEVER = -1e9


def order_logps(terms: Terms, logits_N: Tensor, temperature: float) -> Tensor:
    """Compute the log-probability, in nats, of committing a slot before its canvas's rivals, [N]; 0 for other terms.

    Tokens that a segment commits together are no rivals of each other.

    Args:
        terms: the terms of whole canvases.
        logits_N: [N] values of all terms; only logits are used.
        temperature: logits are divided by it.
    """
    is_logit_N, is_rival_N = terms.laid_out.is_logit, terms.laid_out.is_rival
    if is_logit_N is None or is_rival_N is None:
        return torch.zeros_like(logits_N)
    canvases = terms.grouping(Level.PART)
    canvas_N, num_canvases = canvases.of_term, len(canvases.rows)
    scores_N = logits_N / temperature
    rivals_N = scores_N.masked_fill(~is_rival_N, _NEVER)
    top_C = scores_N.new_full((num_canvases,), _NEVER).scatter_reduce(0, canvas_N, rivals_N.detach(), "amax")
    powers_N = (rivals_N - top_C[canvas_N]).exp() * is_rival_N
    sums_C = scores_N.new_zeros(num_canvases).index_add(0, canvas_N, powers_N)
    # Where nothing is left masked there was no choice: the log-probability is 0.
    against_C = top_C + sums_C.clamp(min=torch.finfo(torch.float32).tiny).log()
    return torch.nn.functional.logsigmoid(scores_N - against_C[canvas_N]) * (is_logit_N & ~is_rival_N)
