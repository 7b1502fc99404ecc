"""What is asked of a policy: the slots that are looked at, and the tokens whose log-probability is wanted there.

Shape letters: B rows, Q queries of one, L slots of a row, N wanted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


CLEAN, FILL = -1, -2
"""Slots of a row of blocks that are of no noisy state: those of the clean canvas, and what fills the row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A teacher's distributions, computed chunk by chunk from its stream and head, and the divergence from them."""

    stream: Tensor
    """[N, D of the teacher] what its head reads at each wanted token's slot."""
    weight: Tensor
    """[V, D of the teacher] its head's matrix."""
    reverse_kl: float
    """The divergence is (1 - reverse_kl) KL(teacher || policy) + reverse_kl KL(policy || teacher)."""
    top_k: int | None
    """Both terms are summed over this many of the teacher's most likely tokens; None: over the whole vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Tokens whose log-probability is wanted, and under which law."""

    slot: Tensor
    """[N] int64, ascending: which of the scored slots each is wanted at."""
    slot_on_host: Tensor | None = None
    """The same on the CPU: the host can tell then without waiting for a device. None: it looks at `slot`."""
    token: Tensor
    """[N] int64; -1 for the one with the highest logit, where a logit is wanted."""
    is_logit: Tensor | None = None
    """[N] bool: those of which the logit is wanted, divided by the temperature and not normalised; None: no logits."""
    temperature: float = 1.0
    """Logits are divided by it."""
    mask_id: int = 0
    """The mask id."""
    excludes_mask_id: bool = False
    """Whether the law gives it no probability, as the sampler's does."""
    forbidden_ids: tuple[int, ...] = ()
    """Other ids to which it gives none."""
    float32_head: bool = False
    """Whether logits are in float32, of a stream and a head in half precision too: not rounded to it."""
    compared: Compared | None = None
    """A teacher's distributions under the same law. The forward then returns the policy's divergence from them instead
    of log-probabilities. None: there is no teacher."""


def query_grid(slots_N: Tensor, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
    """What `Transformer.forward` takes to score slots that are spread unevenly over the rows.

    Args:
        slots_N: ascending indices into the flattened [num_rows * width] canvases.
        num_rows: B.
        width: L.

    Returns:
        queries_BQ, as wide as the row with the most slots, and scored_N.
    """
    rows_N = slots_N // width
    counts_B = rows_N.bincount(minlength=num_rows)
    first_B = counts_B.cumsum(0) - counts_B
    places_N = torch.arange(len(slots_N), device=slots_N.device) - first_B[rows_N]
    queries_BQ = slots_N.new_zeros(num_rows, max(1, int(counts_B.max())))
    queries_BQ[rows_N, places_N] = slots_N % width
    return queries_BQ, rows_N * queries_BQ.shape[1] + places_N
