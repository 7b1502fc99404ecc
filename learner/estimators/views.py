"""Views: the corrupted canvases that an estimator asks the policy about.

Shape letters: V canvases, S slots of one, M slots that are looked at, N scored tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from learner.model.transformer import query_grid


@dataclass(frozen=True, kw_only=True, slots=True)
class Views:
    """Canvases to run and the tokens to score on them.

    Equal canvases are run once: the completions of a group differ only in tokens that an estimator may have masked.
    """

    ids: Tensor
    """[V, S] int64, corrupted."""
    lengths: Tensor
    """[V] int64, used slots."""
    slots: Tensor
    """[M] int64, ascending indices into the flattened [V * S] canvases."""
    scored: Tensor
    """[N] int64, the index into `slots` of each scored token."""
    targets: Tensor
    """[N] int64, the tokens whose log-probability is wanted there."""


def share_equal_views(ids_BS: Tensor, lengths_B: Tensor, rows_N: Tensor, columns_N: Tensor, targets_N: Tensor) -> Views:
    """Views of one canvas for each row, equal canvases merged; token n is scored on row `rows_N`, slot `columns_N`."""
    ids_VS, view_B = ids_BS.unique(dim=0, return_inverse=True)
    lengths_V = lengths_B.new_zeros(len(ids_VS)).scatter_(0, view_B, lengths_B)
    slots_M, scored_N = (view_B[rows_N] * ids_BS.shape[1] + columns_N).unique(return_inverse=True)
    return Views(ids=ids_VS, lengths=lengths_V, slots=slots_M, scored=scored_N, targets=targets_N)


def token_logps(model: nn.Module, views: Views) -> Tensor:
    """Log-probability, in nats, of each scored token: [N] float32.

    The mask id is not excluded from the softmax: a policy that puts mass on it pays for that (d1 does the same).
    """
    width = views.ids.shape[1]
    lengths = None if bool((views.lengths == width).all()) else views.lengths
    logits_MV = model(views.ids, lengths, *query_grid(views.slots, *views.ids.shape)).float()
    return logits_MV[views.scored, views.targets] - logits_MV.logsumexp(dim=-1)[views.scored]
