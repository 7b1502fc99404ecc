"""Target tokens of a forward, the distribution that they are scored under, and an optional teacher.

Shape letters: B rows, Q queries of a row, L slots of a row, N target tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from learner.model.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


CLEAN, PADDING = -1, -2
"""Labels of slots that belong to no noisy state of a block: the clean canvas, and padding of the row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherStates:
    """Hidden states and head of a teacher, of which distributions are computed by chunk, and the divergence from it."""

    head_input: Tensor
    """[N, D of the teacher] input of the teacher's head at each target token's slot."""
    weight: Tensor
    """[V, D of the teacher] matrix of the teacher's head."""
    reverse_kl: float
    """The divergence is (1 - reverse_kl) KL(teacher || policy) + reverse_kl KL(policy || teacher)."""
    top_k: int | None
    """Both terms are summed over this many of the teacher's most likely tokens; None: over the whole vocabulary."""
    renormalizes: bool = False
    """Whether both distributions are those of the policy and the teacher among these tokens alone."""
    pointwise_clip: float | None = None
    """Maximum of a single token's summand, nats; greater ones have no gradient. None: no maximum."""
    chosen: Tensor | None = None
    """[K] int64, distinct: the target tokens whose divergence counts; that of the others is 0. None: all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Target tokens whose log-probabilities are computed, and the distribution (temperature, excluded ids)."""

    slot: Tensor
    """[N] int64, ascending: index of each target's slot among the scored slots."""
    slot_on_host: Tensor | None = None
    """`slot` on the CPU, which avoids a device synchronization. None: the host reads `slot`."""
    token: Tensor
    """[N] int64 target tokens; with `is_logit`, -1 denotes the token with the highest logit."""
    is_logit: Tensor | None = None
    """[N] bool: targets whose unnormalised logit, divided by the temperature, is computed; None: no logits."""
    temperature: float = 1.0
    """Logits are divided by it."""
    mask_id: int = 0
    """The mask id."""
    excludes_mask_id: bool = False
    """Whether the mask id has no probability, as in the sampler's distribution."""
    forbidden_ids: tuple[int, ...] = ()
    """Other ids without probability."""
    float32_head: bool = False
    """Whether logits are float32, not rounded to 16 bits, even if the policy is in half precision."""
    teacher: TeacherStates | None = None
    """Teacher, with the same temperature and excluded ids. The forward then returns the divergence from it instead of
    log-probabilities. None: there is no teacher."""


def query_grid(slots_N: Tensor, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Convert slots that are spread unevenly over the rows to the queries of `Transformer.forward`.

    Args:
        slots_N: ascending indices into the flattened [num_rows * width] canvases.
        num_rows: B.
        width: L.

    Returns:
        queries_BQ, with a width of the most slots in a row, and scored_N.
    """
    rows_N = slots_N // width
    counts_B = rows_N.bincount(minlength=num_rows)
    first_B = counts_B.cumsum(0) - counts_B
    places_N = torch.arange(len(slots_N), device=slots_N.device) - first_B[rows_N]
    queries_BQ = slots_N.new_zeros(num_rows, max(1, int(counts_B.max())))
    queries_BQ[rows_N, places_N] = slots_N % width
    return queries_BQ, rows_N * queries_BQ.shape[1] + places_N
