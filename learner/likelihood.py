"""The evidence lower bound (ELBO) of a text given a prompt, for likelihood evaluations.

With k of L slots masked at random, k uniform on 1..L, the mean of L / k times the sum of the masked tokens'
log-probabilities is a lower bound of the text's (LLaDA, arXiv 2502.09992, equation 6). It is exact for a single token.
Under a block-causal policy a masked token sees the earlier blocks unmasked, which makes the bound tighter.

Shape letters: D draws, L slots of the text, S slots of a canvas, N masked tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from learner.counter import uniform
from learner.estimators.block_views import views_of
from learner.estimators.views import token_logps
from learner.model.transformer import Transformer

_COUNT_KEY, _MASK_KEY = 51, 52


@torch.no_grad()
def evidence_lower_bound(
    model: Transformer, prompt: Sequence[int], text: Sequence[int], *, num_draws: int, max_rows: int, seed: int
) -> float:
    """Estimate a lower bound of the log-probability of `text`, in nats.

    Equal canvases of a forward are run once: the canvases of a single-token text are all equal.

    Args:
        model: the policy.
        prompt: ids before the text; may be empty.
        text: the ids that are scored; 0.0 is returned for none.
        num_draws: number of masks; their counts are spread evenly over 1..L.
        max_rows: maximum canvases of a forward.
        seed: the random key of the masks.
    """
    if not text:
        return 0.0
    length = len(text)
    text_L, prompt_P = torch.tensor(text), torch.tensor(prompt, dtype=torch.long)
    total = 0.0
    for first in range(0, num_draws, max_rows):
        draws_D = torch.arange(first, min(first + max_rows, num_draws))
        masked_DL = _masked(draws_D, num_draws, length, seed)
        shown_DL = torch.where(masked_DL, model.config.mask_token_id, text_L)
        ids_DS = torch.cat((prompt_P.expand(len(draws_D), -1), shown_DL), dim=1)
        rows_N, slots_N = masked_DL.nonzero(as_tuple=True)
        lengths_D = torch.full_like(draws_D, ids_DS.shape[1])
        scored = lengths_D, rows_N, slots_N + len(prompt), text_L[slots_N]
        clean_DS = torch.cat((prompt_P, text_L)).expand_as(ids_DS)
        views = views_of(ids_DS, *scored, clean_RS=clean_DS, block_length=model.config.block_length)
        logps_N = token_logps(model, views).double().cpu()
        total += float((logps_N * (length / masked_DL.sum(dim=1)[rows_N])).sum())
    return total / num_draws


def _masked(draws_D: torch.Tensor, num_draws: int, length: int, seed: int) -> torch.Tensor:
    """Choose the masked slots of each draw, [D, L] bool, at least one each."""
    seeds = torch.tensor(seed)
    place_D = (uniform(seeds, _COUNT_KEY) + draws_D / num_draws) % 1
    count_D = 1 + (place_D * length).floor().long().clamp(max=length - 1)
    noise_DL = uniform(seeds, _MASK_KEY, draws_D[:, None], torch.arange(length))
    return noise_DL.argsort(dim=1).argsort(dim=1) < count_D[:, None]
