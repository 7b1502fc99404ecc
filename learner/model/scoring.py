"""Log-probabilities and logits of wanted tokens, or divergences, without ever holding the logits of all slots.

The head is much the widest matrix: the logits of a few thousand slots of a real vocabulary are gigabytes. It runs on
chunks of the slots, forwards and backwards. A few chunks' log-probabilities are kept for the backward pass; where there
are more, each chunk's are computed again there.

Shape letters: M slots that are scored, C of a chunk, D width, V vocabulary, N wanted tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from learner.model.wanted import Compared, Wanted

# Logits of a chunk, of which there are two tensors. On a CPU 16 MiB each: the allocator of glibc gives blocks of 32 MiB
# and more back to the system at once, and each new one then costs its page faults. On a GPU rows enough, at LLaDA's
# vocabulary, that the product is bound by arithmetic and not by reading the matrix.
_MOST_LOGITS_CPU, MOST_LOGITS_GPU = 2**22, 2**26
# Logits that are kept for a backward pass: the product that is saved is a sixth of the head's.
_MOST_KEPT_CPU, MOST_KEPT_GPU = 2**24, 2**26


def wanted_logps(x_MD: Tensor, weight_VD: Tensor, wanted: Wanted) -> Tensor:
    """[N] float32 log-probabilities, in nats, of tokens under the head's matrix; logits where these are wanted, or
    divergences."""
    if wanted.compared is not None:
        # Terms of one slot may have teachers that read different texts.
        divergences_N: Tensor = _Divergences.apply(x_MD[wanted.slot], weight_VD, wanted, wanted.compared)
        return divergences_N
    logps_N: Tensor = _WantedLogps.apply(x_MD, weight_VD, wanted)
    return logps_N


class _WantedLogps(torch.autograd.Function):
    """With its backward pass written out, which needs one tensor as large as a chunk's logits where autograd's needs
    four."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, weight_VD: Tensor, wanted: Wanted) -> Tensor:
        ctx.wanted, ctx.kept = wanted, []
        most_kept = _MOST_KEPT_CPU if x_MD.device.type == "cpu" else MOST_KEPT_GPU
        is_kept = any(ctx.needs_input_grad) and len(x_MD) * len(weight_VD) <= most_kept
        parts, tokens = [], []
        for rows, slot_N, inside in _chunks(x_MD, weight_VD, wanted):
            logps_CV, values_N, token_N = _scored(x_MD[rows], weight_VD, wanted, slot_N, inside)
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
        for rows, slot_N, inside in _chunks(x_MD, weight_VD, ctx.wanted):
            # What is kept is overwritten: a second backward computes it again.
            logps_CV = ctx.kept.pop(0) if ctx.kept else _log_softmax(_logits(x_MD[rows], weight_VD, ctx.wanted))
            # Of log softmax: what comes in at the token, less the probability of each id times all that comes in. Of a
            # logit the former alone.
            is_logit_N = ctx.wanted.is_logit
            of_logps_N = grad_N[inside] if is_logit_N is None else grad_N[inside].masked_fill(is_logit_N[inside], 0.0)
            total_C = grad_N.new_zeros(len(logps_CV)).index_add_(0, slot_N, of_logps_N)
            grad_CV = logps_CV.exp_().mul_(-total_C[:, None])
            grad_CV.index_put_((slot_N, token_N[inside]), grad_N[inside], accumulate=True)
            if ctx.wanted.temperature != 1.0:
                grad_CV /= ctx.wanted.temperature
            grad_CV = grad_CV.to(x_MD.dtype)
            if grad_x_MD is not None:
                torch.mm(grad_CV, weight_VD, out=grad_x_MD[rows])
            if of_weight and grad_weight_VD is None:
                grad_weight_VD = grad_CV.T @ x_MD[rows]
            elif grad_weight_VD is not None:
                grad_weight_VD.addmm_(grad_CV.T, x_MD[rows])
        return grad_x_MD, grad_weight_VD, None


class _Divergences(torch.autograd.Function):
    """Of the policy from the teacher, at each of N slots. Both distributions of a chunk are computed again for the
    backward pass."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, wanted: Wanted, compared: Compared) -> Tensor:
        ctx.wanted, ctx.compared = wanted, compared
        ctx.save_for_backward(x_ND, weight_VD)
        parts = [
            _divergence(*_both(x_ND[rows], compared.stream[rows], weight_VD, wanted, compared), compared)
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
            both = _both(x_ND[rows], ctx.compared.stream[rows], weight_VD, ctx.wanted, ctx.compared)
            grad_CV = _slope(*both, ctx.compared).mul_(grad_N[rows, None])
            if ctx.wanted.temperature != 1.0:
                grad_CV /= ctx.wanted.temperature
            grad_CV = grad_CV.to(x_ND.dtype)
            if grad_x_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_x_ND[rows])
            if grad_weight_VD is not None:
                grad_weight_VD.addmm_(grad_CV.T, x_ND[rows])
        return grad_x_ND, grad_weight_VD, None, None


def _both(
    x_CD: Tensor, stream_CD: Tensor, weight_VD: Tensor, wanted: Wanted, compared: Compared
) -> tuple[Tensor, Tensor]:
    """[C, V] the policy's log-probabilities, and how much greater the teacher's are; 0 of ids that the law excludes."""
    ours_CV = _log_softmax(_logits(x_CD, weight_VD, wanted))
    more_CV = _log_softmax(_logits(stream_CD, compared.weight, wanted)) - ours_CV
    for excluded in _excluded(wanted):
        more_CV[:, excluded] = 0.0
    return ours_CV, more_CV


def _counted(ours_CV: Tensor, more_CV: Tensor, compared: Compared) -> tuple[Tensor, Tensor]:
    """[C, V] the probabilities of policy and teacher, 0 of tokens that do not count."""
    theirs_CV = ours_CV + more_CV
    ours_CV = ours_CV.exp()
    if compared.top_k is not None and compared.top_k < theirs_CV.shape[1]:
        is_left_out_CV = torch.ones_like(theirs_CV, dtype=torch.bool)
        # By log-probabilities: of a sure teacher most probabilities are 0 in float32, and equal.
        is_left_out_CV.scatter_(1, theirs_CV.topk(compared.top_k, dim=1).indices, value=False)
        ours_CV.masked_fill_(is_left_out_CV, 0.0)
        theirs_CV.masked_fill_(is_left_out_CV, -torch.inf)
    return ours_CV, theirs_CV.exp_()


def _divergence(ours_CV: Tensor, more_CV: Tensor, compared: Compared) -> Tensor:
    """[C] in nats."""
    ours, theirs = _counted(ours_CV, more_CV, compared)
    return (theirs.mul_(1 - compared.reverse_kl).sub_(ours, alpha=compared.reverse_kl) * more_CV).sum(dim=1)


def _slope(ours_CV: Tensor, more_CV: Tensor, compared: Compared) -> Tensor:
    """[C, V] the derivative of the divergence by the policy's logits under the law.

    By its log-probabilities it is -(1 - w) p(teacher) + w p(policy) (1 - more), and a log softmax takes from that the
    probability of each id times all of it.
    """
    ours, theirs = _counted(ours_CV, more_CV, compared)
    slope_CV = ours.mul_(1 - more_CV).mul_(compared.reverse_kl).sub_(theirs, alpha=1 - compared.reverse_kl)
    return slope_CV.addcmul_(ours_CV.exp(), slope_CV.sum(dim=1, keepdim=True), value=-1.0)


def _chunk_size(x_MD: Tensor, weight_VD: Tensor) -> int:
    """Slots of a chunk."""
    most = _MOST_LOGITS_CPU if x_MD.device.type == "cpu" else MOST_LOGITS_GPU
    return max(1, most // len(weight_VD))


def _even_chunks(x_ND: Tensor, weight_VD: Tensor) -> Iterator[slice]:
    """Of slots; where there are none, one empty chunk."""
    size = _chunk_size(x_ND, weight_VD)
    for begin in range(0, max(1, len(x_ND)), size):
        yield slice(begin, begin + size)


def _chunks(x_MD: Tensor, weight_VD: Tensor, wanted: Wanted) -> Iterator[tuple[slice, Tensor, slice]]:
    """Of each chunk: its slots, those within it that are wanted, and where these are among all N."""
    size = _chunk_size(x_MD, weight_VD)
    # Where nothing is scored there is one empty chunk.
    begins = range(0, max(1, len(x_MD)), size)
    slot_N = wanted.slot if wanted.slot_on_host is None else wanted.slot_on_host
    ends = torch.searchsorted(slot_N, torch.tensor([*begins, len(x_MD)], device=slot_N.device)).tolist()
    for index, begin in enumerate(begins):
        inside = slice(ends[index], ends[index + 1])
        yield slice(begin, begin + size), wanted.slot[inside] - begin, inside


def _logits(x_CD: Tensor, weight_VD: Tensor, wanted: Wanted) -> Tensor:
    """[C, V] under the law."""
    logits_CV = _in_float32(x_CD, weight_VD) if wanted.float32_head else F.linear(x_CD, weight_VD)
    if wanted.temperature != 1.0:
        logits_CV = logits_CV.float().div_(wanted.temperature)
    # One by one: an index would have to be sent to a device, and there are few.
    for excluded in _excluded(wanted):
        logits_CV[:, excluded] = -torch.inf
    return logits_CV


def _excluded(wanted: Wanted) -> tuple[int, ...]:
    """Ids that the law gives no probability."""
    return (*wanted.forbidden_ids, *([wanted.mask_id] if wanted.excludes_mask_id else []))


def _in_float32(x_CD: Tensor, weight_VD: Tensor) -> Tensor:
    """[C, V], as it is summed and not rounded."""
    if x_CD.device.type == "cuda" and x_CD.dtype != torch.float32:
        return torch.mm(x_CD, weight_VD.T, out_dtype=torch.float32)
    return F.linear(x_CD.float(), weight_VD.float())


def _log_softmax(logits_CV: Tensor) -> Tensor:
    """[C, V] float32."""
    return logits_CV.log_softmax(dim=-1, dtype=torch.float32)


def _scored(
    x_CD: Tensor, weight_VD: Tensor, wanted: Wanted, slot_N: Tensor, inside: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """[C, V] the log-probabilities of a chunk; [N] what is wanted of it, and [N] of which tokens."""
    logits_CV, token_N = _logits(x_CD, weight_VD, wanted), wanted.token[inside]
    logps_CV = _log_softmax(logits_CV)
    if wanted.is_logit is None:
        return logps_CV, logps_CV[slot_N, token_N], token_N
    token_N = torch.where(token_N < 0, logits_CV.argmax(dim=-1)[slot_N], token_N)
    logit_N = logits_CV[slot_N, token_N].float()
    return logps_CV, torch.where(wanted.is_logit[inside], logit_N, logps_CV[slot_N, token_N]), token_N
