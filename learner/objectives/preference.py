"""DPO on differences of the ELBO, over preference pairs, stored or from graded groups (VRPO, LLaDA 1.5).

See arXiv 2505.19223.

Shape letters: N terms, B rows, G groups, K pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from learner.estimators.base import Estimator, RowValue, SamplerFacts
from learner.estimators.groupings import Level
from learner.estimators.terms import Terms
from learner.model.deferred import torch
from learner.objectives.base import Logps, Loss
from learner.objectives.compatibility import shared_incompatibility
from learner.objectives.units import Normalize, RowFacts

if TYPE_CHECKING:
    from torch import Tensor


class PreferenceConfig(BaseModel):
    """-log sigmoid(beta * (log-ratio of the better - log-ratio of the worse)) over the pairs of each group.

    The log-ratio is new - reference.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    precomputes_row_weights: ClassVar[bool] = False
    needs_float32_head: ClassVar[bool] = False
    compares_groups: ClassVar[bool] = True
    tilts_by_reward: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False
    weigh_by_length: ClassVar[bool] = False
    needs_old: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = True
    level: ClassVar[Level] = Level.ROW
    normalize_by: ClassVar[Normalize] = Normalize.GROUP_SUM

    name: Literal["preference"] = "preference"
    """The objective."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """DPO's beta: the scale of log-ratio differences."""

    def incompatibility(self, estimator: Estimator, max_staleness: int) -> str | None:
        """Return why it does not fit: it compares ELBOs."""
        own = None
        if estimator.facts.row_value is not RowValue.ELBO:
            own = f"objective {self.name} compares ELBOs: estimator must give them, as elbo does, not {estimator.name}"
        return shared_incompatibility(self, estimator, max_staleness, own=own)

    def sampler_incompatibility(self, sampler: SamplerFacts) -> str | None:
        """Return None: it uses no record of the sampler."""
        return None

    def loss(self, terms: Terms, logps: Logps, rows: RowFacts) -> Loss:
        """Compute the mean over each group's pairs of unequal advantage, weighted by the group's share."""
        assert logps.reference is not None, "the learner has a reference where needs_reference says so"
        gain_B, share_B = rows.values(terms, logps.new - logps.reference), rows.shares(terms)
        better_K, worse_K = _pairs(rows.advantages, rows.groups, share_B > 0)
        if not len(better_K):
            nothing = gain_B.detach()[:0]
            return Loss(total=(gain_B * 0).sum(), per_unit={"preferred": nothing, "margin": nothing})
        margin_K = self.beta * (gain_B[better_K] - gain_B[worse_K])
        group_K = rows.groups[better_K]
        # Not `bincount`, which synchronises the host with the GPU.
        pairs_G = share_B.new_zeros(rows.num_groups).index_add_(0, group_K, torch.ones_like(margin_K))
        share_K = share_B[better_K] / pairs_G[group_K]
        return Loss(
            total=(-torch.nn.functional.logsigmoid(margin_K) * share_K).sum(),
            per_unit={"preferred": (margin_K.detach() > 0).float(), "margin": margin_K.detach()},
        )


def _pairs(advantages_B: Tensor, groups_B: Tensor, counts_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return all pairs of rows of the same group in which the first row has the greater advantage."""
    same = groups_B[:, None] == groups_B
    is_pair = same & (advantages_B[:, None] > advantages_B) & counts_B[:, None] & counts_B
    better, worse = is_pair.nonzero(as_tuple=True)
    return better, worse
