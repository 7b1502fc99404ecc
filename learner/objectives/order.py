"""How probable an order of commits was: the part of a denoise step's decision that tokens do not show.

A step ranks the masked slots of its block by their highest probability. Plackett and Luce's model makes a distribution
of it: the first is drawn by softmax over all, the next over those that are left, and so on (MAPG, arXiv 2607.15200).

Shape letters: N terms, B rows, S ranked sets, W slots of the largest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.estimators.terms import TOKEN, Terms

_NEVER = -1e9


def order_logps(terms: Terms, logps_N: Tensor, temperature: float, num_rows: int) -> Tensor:
    """[B] log-probability, in nats, of the commits of each row's ranked sets, each times its weight.

    Slots that one step committed together count in the order of the slots; those that were only ranked come after.
    """
    ranked = (terms.places != TOKEN).nonzero()[:, 0]
    total_B = logps_N.new_zeros(num_rows)
    if not len(ranked):
        return total_B + 0 * logps_N.sum()
    row, place, slot = terms.rows[ranked], terms.places[ranked], terms.slots[ranked]
    _, set_M = (row * (int(terms.parts.max()) + 1) + terms.parts[ranked]).unique(return_inverse=True)
    # By set, then the committed ones by step and slot, then the others.
    last = int(place.max()) + 1
    when = torch.where(place < 0, last, place) * (int(slot.max()) + 1) + slot
    order = (set_M * (int(when.max()) + 1) + when).argsort()
    ranked, set_M, place = ranked[order], set_M[order], place[order]
    sizes_S = set_M.bincount()
    column_M = torch.arange(len(set_M), device=set_M.device) - (sizes_S.cumsum(0) - sizes_S)[set_M]
    shape = len(sizes_S), int(sizes_S.max())
    utility_SW = logps_N.new_full(shape, _NEVER).index_put((set_M, column_M), logps_N[ranked] / temperature)
    # Each is drawn from those that were not drawn before it: it and all behind it.
    left_SW = utility_SW.flip(1).logcumsumexp(dim=1).flip(1)
    logp_M = (utility_SW - left_SW)[set_M, column_M] * (place >= 0)
    return total_B.index_add(0, terms.rows[ranked], terms.weights[ranked] * logp_M)
