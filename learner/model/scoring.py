"""Chunked head: log-probabilities or logits of target tokens, or divergences from a teacher.

The head is by far the widest matrix: the logits of a few thousand slots of a real vocabulary are gigabytes. So they are
never materialized for all slots: forward and backward pass run on chunks of slots. The log-probabilities of a few
chunks are kept for the backward pass. If there are more chunks, they are recomputed there.

Shape letters: M scored slots, C slots of a chunk, D width, V vocabulary, N target tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from learner.model.targets import Targets, TeacherStates

# Logits of a chunk, of which there are two tensors. On a CPU 16 MiB each: glibc's allocator returns blocks of 32 MiB or
# more to the system at once, and each new block then costs page faults. On a GPU, enough rows at LLaDA's vocabulary for
# the product to be bound by arithmetic and not by reading the matrix.
_MAX_LOGITS_CPU, MAX_LOGITS_GPU = 2**22, 2**26
# Maximum logits that are kept for a backward pass. Keeping them saves a product, a sixth of the head's cost.
_MAX_KEPT_CPU, MAX_KEPT_GPU = 2**24, 2**26


def score_targets(x_MD: Tensor, weight_VD: Tensor, targets: Targets) -> Tensor:
    """Compute [N] float32 log-probabilities, in nats, of the target tokens under the head's matrix `weight_VD`.

    For targets with `is_logit` the result is the logit. With a teacher (`teacher`) it is the divergence.
    """
    if targets.teacher is not None:
        return _divergences(x_MD, weight_VD, targets, targets.teacher)
    logps_N: Tensor = _TargetLogps.apply(x_MD, weight_VD, targets)
    return logps_N


def _divergences(x_MD: Tensor, weight_VD: Tensor, targets: Targets, teacher: TeacherStates) -> Tensor:
    """Compute the divergence [N] of each target token, 0 of those that are not chosen."""
    # Per target token, not per slot: the teachers of one slot's targets may have different contexts.
    if teacher.chosen is None:
        divergences_N: Tensor = _Divergences.apply(x_MD[targets.slot], weight_VD, targets, teacher)
        return divergences_N
    some = replace(teacher, head_input=teacher.head_input[teacher.chosen])
    divergences_K: Tensor = _Divergences.apply(x_MD[targets.slot[teacher.chosen]], weight_VD, targets, some)
    return divergences_K.new_zeros(len(targets.slot)).index_copy(0, teacher.chosen, divergences_K)


class _TargetLogps(torch.autograd.Function):
    """Chunked log-probabilities. The explicit backward pass needs one tensor of a chunk's logits, autograd's four."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, weight_VD: Tensor, targets: Targets) -> Tensor:
        ctx.targets, ctx.kept = targets, []
        max_kept = _MAX_KEPT_CPU if x_MD.device.type == "cpu" else MAX_KEPT_GPU
        is_kept = any(ctx.needs_input_grad) and len(x_MD) * len(weight_VD) <= max_kept
        parts, tokens = [], []
        for rows, slot_N, inside in _chunks(x_MD, weight_VD, targets):
            logps_CV, values_N, token_N = _scored(x_MD[rows], weight_VD, targets, slot_N, inside)
            parts.append(values_N)
            tokens.append(token_N)
            if is_kept:
                ctx.kept.append(logps_CV)
        ctx.save_for_backward(x_MD, weight_VD, torch.cat(tokens))
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_MD, weight_VD, token_N = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad[:2]
        grad_x_MD = torch.empty_like(x_MD) if of_x else None
        grad_weight_VD = None
        for rows, slot_N, inside in _chunks(x_MD, weight_VD, ctx.targets):
            # Kept log-probabilities are overwritten below: a second backward pass recomputes them.
            logps_CV = ctx.kept.pop(0) if ctx.kept else _log_softmax(_logits(x_MD[rows], weight_VD, ctx.targets))
            # Gradient of the log softmax: the incoming gradient at the token, minus each id's probability times the sum
            # of the incoming gradients. For a raw logit, the first term alone.
            is_logit_N = ctx.targets.is_logit
            of_logps_N = grad_N[inside] if is_logit_N is None else grad_N[inside].masked_fill(is_logit_N[inside], 0.0)
            total_C = grad_N.new_zeros(len(logps_CV)).index_add_(0, slot_N, of_logps_N)
            grad_CV = logps_CV.exp_().mul_(-total_C[:, None])
            grad_CV.index_put_((slot_N, token_N[inside]), grad_N[inside], accumulate=True)
            if ctx.targets.temperature != 1.0:
                grad_CV /= ctx.targets.temperature
            grad_CV = grad_CV.to(x_MD.dtype)
            if grad_x_MD is not None:
                torch.mm(grad_CV, weight_VD, out=grad_x_MD[rows])
            if of_weight and grad_weight_VD is None:
                grad_weight_VD = grad_CV.T @ x_MD[rows]
            elif grad_weight_VD is not None:
                grad_weight_VD.addmm_(grad_CV.T, x_MD[rows])
        return grad_x_MD, grad_weight_VD, None


class _Divergences(torch.autograd.Function):
    """Chunked divergence between policy and teacher at N slots. The backward pass recomputes both distributions."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets: Targets, teacher: TeacherStates) -> Tensor:
        ctx.targets, ctx.teacher = targets, teacher
        ctx.save_for_backward(x_ND, weight_VD)
        parts = [
            _divergence(
                *_policy_and_teacher(x_ND[rows], teacher.head_input[rows], weight_VD, targets, teacher), teacher
            )
            for rows in _even_chunks(x_ND, weight_VD)
        ]
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_ND, weight_VD = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad[:2]
        grad_x_ND = torch.zeros_like(x_ND) if of_x else None
        grad_weight_VD = torch.zeros_like(weight_VD) if of_weight else None
        for rows in _even_chunks(x_ND, weight_VD):
            logps = _policy_and_teacher(x_ND[rows], ctx.teacher.head_input[rows], weight_VD, ctx.targets, ctx.teacher)
            grad_CV = _divergence_gradient(*logps, ctx.teacher).mul_(grad_N[rows, None])
            if ctx.targets.temperature != 1.0:
                grad_CV /= ctx.targets.temperature
            grad_CV = grad_CV.to(x_ND.dtype)
            if grad_x_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_x_ND[rows])
            if grad_weight_VD is not None:
                grad_weight_VD.addmm_(grad_CV.T, x_ND[rows])
        return grad_x_ND, grad_weight_VD, None, None


def _policy_and_teacher(
    x_CD: Tensor, head_input_CD: Tensor, weight_VD: Tensor, targets: Targets, teacher: TeacherStates
) -> tuple[Tensor, Tensor]:
    """Compute [C, V] the policy's log-probabilities, and the teacher's minus them; 0 for ids without probability."""
    ours_CV = _log_softmax(_logits(x_CD, weight_VD, targets))
    theirs_CV = _log_softmax(_logits(head_input_CD, teacher.weight, targets))
    if teacher.renormalizes and (is_left_out_CV := _outside_top_k(theirs_CV, teacher.top_k)) is not None:
        ours_CV = ours_CV.masked_fill_(is_left_out_CV, -torch.inf).log_softmax(dim=1)
        theirs_CV = theirs_CV.masked_fill_(is_left_out_CV, -torch.inf).log_softmax(dim=1)
        return ours_CV, (theirs_CV - ours_CV).masked_fill_(ours_CV.isneginf(), 0.0)
    log_ratio_CV = theirs_CV - ours_CV
    for excluded in _excluded(targets):
        log_ratio_CV[:, excluded] = 0.0
    return ours_CV, log_ratio_CV


def _outside_top_k(theirs_CV: Tensor, top_k: int | None) -> Tensor | None:
    """Return the ids outside the teacher's top k, [C, V] bool; None if there are none."""
    if top_k is None or top_k >= theirs_CV.shape[1]:
        return None
    # By log-probabilities: most probabilities of a confident teacher underflow to 0 in float32, and would tie.
    is_left_out_CV = torch.ones_like(theirs_CV, dtype=torch.bool)
    return is_left_out_CV.scatter_(1, theirs_CV.topk(top_k, dim=1).indices, value=False)


def _top_k_probabilities(ours_CV: Tensor, log_ratio_CV: Tensor, teacher: TeacherStates) -> tuple[Tensor, Tensor]:
    """Compute the probabilities [C, V] of policy and teacher; 0 outside the teacher's top k."""
    theirs_CV = ours_CV + log_ratio_CV
    ours_CV = ours_CV.exp()
    if (is_left_out_CV := _outside_top_k(theirs_CV, teacher.top_k)) is not None:
        ours_CV.masked_fill_(is_left_out_CV, 0.0)
        theirs_CV.masked_fill_(is_left_out_CV, -torch.inf)
    return ours_CV, theirs_CV.exp_()


def _summands(ours: Tensor, theirs: Tensor, log_ratio_CV: Tensor, reverse_kl: float) -> Tensor:
    """Compute each id's part of the divergence, [C, V], in nats."""
    return (theirs * (1 - reverse_kl)).sub_(ours, alpha=reverse_kl).mul_(log_ratio_CV)


def _divergence(ours_CV: Tensor, log_ratio_CV: Tensor, teacher: TeacherStates) -> Tensor:
    """Compute the divergence [C], in nats."""
    ours, theirs = _top_k_probabilities(ours_CV, log_ratio_CV, teacher)
    summands_CV = _summands(ours, theirs, log_ratio_CV, teacher.reverse_kl)
    if teacher.pointwise_clip is not None:
        summands_CV.clamp_(max=teacher.pointwise_clip)
    return summands_CV.sum(dim=1)


def _divergence_gradient(ours_CV: Tensor, log_ratio_CV: Tensor, teacher: TeacherStates) -> Tensor:
    """Compute the derivative [C, V] of the divergence by the policy's tempered logits.

    The derivative by its log-probabilities is -(1 - w) p(teacher) + w p(policy) (1 - more), and 0 where a summand is
    clipped. The log softmax subtracts from it each id's probability times its sum.
    """
    ours, theirs = _top_k_probabilities(ours_CV, log_ratio_CV, teacher)
    is_clipped_CV = None
    if teacher.pointwise_clip is not None:
        is_clipped_CV = _summands(ours, theirs, log_ratio_CV, teacher.reverse_kl) > teacher.pointwise_clip
    gradient_CV = ours.mul_(1 - log_ratio_CV).mul_(teacher.reverse_kl).sub_(theirs, alpha=1 - teacher.reverse_kl)
    if is_clipped_CV is not None:
        gradient_CV.masked_fill_(is_clipped_CV, 0.0)
    return gradient_CV.addcmul_(ours_CV.exp(), gradient_CV.sum(dim=1, keepdim=True), value=-1.0)


def _chunk_size(x_MD: Tensor, weight_VD: Tensor) -> int:
    """Return the number of slots of a chunk."""
    max_logits = _MAX_LOGITS_CPU if x_MD.device.type == "cpu" else MAX_LOGITS_GPU
    return max(1, max_logits // len(weight_VD))


def _even_chunks(x_ND: Tensor, weight_VD: Tensor) -> Iterator[slice]:
    """Yield the slots of each chunk; one empty chunk if there are none."""
    size = _chunk_size(x_ND, weight_VD)
    for begin in range(0, max(1, len(x_ND)), size):
        yield slice(begin, begin + size)


def _chunks(x_MD: Tensor, weight_VD: Tensor, targets: Targets) -> Iterator[tuple[slice, Tensor, slice]]:
    """Yield for each chunk: its slots, its targets' slots counted within it, and its targets' range among all N."""
    size = _chunk_size(x_MD, weight_VD)
    # Without scored slots there is one empty chunk.
    begins = range(0, max(1, len(x_MD)), size)
    slot_N = targets.slot if targets.slot_on_host is None else targets.slot_on_host
    ends = torch.searchsorted(slot_N, torch.tensor([*begins, len(x_MD)], device=slot_N.device)).tolist()
    for index, begin in enumerate(begins):
        inside = slice(ends[index], ends[index + 1])
        yield slice(begin, begin + size), targets.slot[inside] - begin, inside


def _logits(x_CD: Tensor, weight_VD: Tensor, targets: Targets) -> Tensor:
    """Compute the logits [C, V], divided by the temperature, with -inf for excluded ids."""
    logits_CV = _in_float32(x_CD, weight_VD) if targets.float32_head else F.linear(x_CD, weight_VD)
    if targets.temperature != 1.0:
        logits_CV = logits_CV.float().div_(targets.temperature)
    # One by one: there are few, and an index tensor would have to be copied to the device.
    for excluded in _excluded(targets):
        logits_CV[:, excluded] = -torch.inf
    return logits_CV


def _excluded(targets: Targets) -> tuple[int, ...]:
    """Return the ids that have no probability."""
    return (*targets.forbidden_ids, *([targets.mask_id] if targets.excludes_mask_id else []))


def _in_float32(x_CD: Tensor, weight_VD: Tensor) -> Tensor:
    """Compute the logits [C, V] in float32, without rounding the accumulated sums."""
    if x_CD.device.type == "cuda" and x_CD.dtype != torch.float32:
        return torch.mm(x_CD, weight_VD.T, out_dtype=torch.float32)
    return F.linear(x_CD.float(), weight_VD.float())


def _log_softmax(logits_CV: Tensor) -> Tensor:
    """Compute float32 log-probabilities [C, V]."""
    return logits_CV.log_softmax(dim=-1, dtype=torch.float32)


def _scored(
    x_CD: Tensor, weight_VD: Tensor, targets: Targets, slot_N: Tensor, inside: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a chunk's log-probabilities [C, V], and its targets' values [N] and tokens [N]."""
    logits_CV, token_N = _logits(x_CD, weight_VD, targets), targets.token[inside]
    logps_CV = _log_softmax(logits_CV)
    if targets.is_logit is None:
        return logps_CV, logps_CV[slot_N, token_N], token_N
    token_N = torch.where(token_N < 0, logits_CV.argmax(dim=-1)[slot_N], token_N)
    logit_N = logits_CV[slot_N, token_N].float()
    return logps_CV, torch.where(targets.is_logit[inside], logit_N, logps_CV[slot_N, token_N]), token_N
