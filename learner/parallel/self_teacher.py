"""The policy as its own teacher: it sees some of what the completion holds in later blocks (d-OPSD, arXiv 2606.18195).

Shape letters: B rows of a rank, L completion slots, N terms, C canvases of the teacher.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from learner.batch import GroupedBatch, join_canvas
from learner.estimators import SamplerFacts, Terms, Views, shown_future, token_hidden_states
from learner.flops import CanvasSums, forward_flops
from learner.model.config import TransformerConfig
from learner.model.lora_config import FULL_FINE_TUNING
from learner.model.scoring import score_targets
from learner.model.targets import Targets, TeacherStates
from learner.objectives.distillation import DistillationConfig
from learner.parallel.sharding import ShardedPolicy


class SelfTeacher:
    """The reference, on the policy's canvases with some later slots filled in."""

    def __init__(
        self,
        policy: ShardedPolicy,
        reference: ShardedPolicy | None,
        objective: DistillationConfig,
        sampler: SamplerFacts,
    ) -> None:
        """Teach by `reference`, or if it is None by the policy with its adapter off."""
        self._policy, self._reference, self._objective, self._sampler = policy, reference, objective, sampler

    def states(self, terms: Terms, batch: GroupedBatch) -> TeacherStates:
        """Compute its hidden states at the slots of terms, and choose the slots that count. A collective.

        Of a state as many slots count as its denoise step committed: those where the teacher's highest logit is
        greatest.

        Args:
            terms: terms of rows of `batch`, whose parts are denoise steps.
            batch: the rank's rows, on the CPU.
        """
        model, device = self._reference or self._policy, self._policy.device
        views, counts_C = self._views(terms, batch)
        adapters = self._policy.disable_adapters() if self._reference is None else nullcontext()
        with model.without_gradients(), adapters:
            head_input_ND = token_hidden_states(model.module, views, device)
        weight_VD = model.gathered_head().to(head_input_ND.dtype)
        return TeacherStates(
            head_input=head_input_ND,
            weight=weight_VD,
            reverse_kl=self._objective.reverse_kl,
            top_k=self._objective.top_k,
            renormalizes=self._objective.renormalize_top_k,
            pointwise_clip=self._objective.pointwise_clip,
            chosen=_most_certain(head_input_ND, weight_VD, views, counts_C),
        )

    def flops(self, terms: Terms, batch: GroupedBatch) -> float:
        """Count the FLOP of its forward for some terms."""
        views, _ = self._views(terms, batch)
        return forward_flops(self._policy.config, FULL_FINE_TUNING, CanvasSums.of(views)).total

    def _views(self, terms: Terms, batch: GroupedBatch) -> tuple[Views, Tensor]:
        return teacher_views(terms, batch, self._policy.config, self._objective, self._sampler)


def teacher_views(
    terms: Terms, batch: GroupedBatch, model: TransformerConfig, objective: DistillationConfig, sampler: SamplerFacts
) -> tuple[Views, Tensor]:
    """Return the teacher's canvases, one per row and denoise step, and the slots that each step committed, [C]."""
    assert objective.future_share is not None, "the objective has a self-teacher"
    rows_N, steps_N, slots_N = terms.rows.cpu(), terms.parts.cpu(), terms.slots.cpu()
    num_steps = int(steps_N.max()) + 1
    keys_C, canvas_N = (rows_N * num_steps + steps_N).unique(return_inverse=True)
    some, steps_C = batch.select(keys_C // num_steps), keys_C % num_steps
    is_shown_CL = (some.step_map >= 0) & (some.step_map < steps_C[:, None])
    is_shown_CL |= shown_future(some, steps_C, objective.future_share, sampler)
    completion_CL = some.completion_ids.masked_fill(~is_shown_CL, model.mask_token_id)
    ids_CS, columns_CL = join_canvas(some, some.prompt_ids, completion_CL, model.pad_token_id)
    columns_N = columns_CL[canvas_N, slots_N]
    slots_M, scored_N = (canvas_N * ids_CS.shape[1] + columns_N).unique(return_inverse=True)
    views = Views(
        ids=ids_CS,
        lengths=some.prompt_lengths + batch.num_slots,
        slots=slots_M,
        scored=scored_N,
        targets=torch.zeros_like(scored_N),
        concatenates_rows=terms.views.concatenates_rows,
    )
    return views, (some.step_map == steps_C[:, None]).sum(dim=1)


def _most_certain(head_input_ND: Tensor, weight_VD: Tensor, views: Views, counts_C: Tensor) -> Tensor:
    """Return the terms with the greatest of the highest logits, as many of each canvas as `counts_C`, [K] int64."""
    num_terms, device = len(head_input_ND), head_input_ND.device
    every_N = torch.arange(num_terms, device=device)
    highest = Targets(
        slot=every_N, token=torch.full_like(every_N, -1), is_logit=torch.ones_like(every_N, dtype=torch.bool)
    )
    with torch.no_grad():
        falling_N = score_targets(head_input_ND, weight_VD, highest).argsort(descending=True, stable=True)
    canvas_N = views.slots[views.scored] // views.ids.shape[1]
    order_N = falling_N[canvas_N.to(device)[falling_N].argsort(stable=True)]
    # Each canvas's terms now follow each other. How many it has, and which places count, is known on the host.
    size_C = canvas_N.bincount(minlength=len(counts_C))
    rank_N = torch.arange(num_terms) - (size_C.cumsum(0) - size_C).repeat_interleave(size_C)
    return order_N[(rank_N < counts_C.repeat_interleave(size_C)).nonzero()[:, 0].to(device)]
