"""Chunked log-probabilities against plain autograd, with kept and with recomputed logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from learner.model import scoring
from learner.model.scoring import Targets, score_targets

SLOTS = torch.tensor([0, 0, 1, 4, 4, 4, 6])


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_MD, weight_VD = (torch.randn(size, 5, generator=generator) for size in (7, 11))
    return x_MD.to(dtype).requires_grad_(), weight_VD.to(dtype).requires_grad_()


def _plainly(x_MD: Tensor, weight_VD: Tensor, targets: Targets) -> Tensor:
    logits_MV = (x_MD @ weight_VD.T).float() / targets.temperature
    if targets.excludes_mask_id:
        logits_MV = logits_MV.index_fill(1, torch.tensor([targets.mask_id, *targets.forbidden_ids]), -torch.inf)
    logps_MV = logits_MV.log_softmax(dim=-1)
    logps_N = logps_MV[targets.slot, targets.token.clamp(min=0)]
    if targets.is_logit is None:
        return logps_N
    of_token_N, top_N = logits_MV[targets.slot, targets.token.clamp(min=0)], logits_MV.amax(dim=-1)[targets.slot]
    return torch.where(targets.is_logit, torch.where(targets.token < 0, top_N, of_token_N), logps_N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("temperature", "excludes"), [(1.0, False), (0.7, True)])
@pytest.mark.parametrize("is_logit", [False, True])
@pytest.mark.parametrize(("chunk", "kept"), [(1000, 1000), (22, 1000), (22, 0), (44, 0)])
def test_values_and_gradients_equal_autograds(
    chunk: int,
    kept: int,
    temperature: float,
    excludes: bool,
    is_logit: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scoring, "_MAX_LOGITS_CPU", chunk)
    monkeypatch.setattr(scoring, "_MAX_KEPT_CPU", kept)
    targets = Targets(
        slot=SLOTS,
        token=torch.tensor([0, -1, 10, 4, -1, 4, 9] if is_logit else [0, 2, 10, 4, 6, 4, 9]),
        is_logit=torch.tensor([False, True, False, True, True, False, True]) if is_logit else None,
        temperature=temperature,
        mask_id=3,
        excludes_mask_id=excludes,
        forbidden_ids=(7,) if excludes else (),
    )
    weights_N = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, 1.0, -1.0])
    x_MD, weight_VD = _inputs(dtype)
    expected_N = _plainly(x_MD, weight_VD, targets)
    expected = torch.autograd.grad((expected_N * weights_N).sum(), (x_MD, weight_VD))
    logps_N = score_targets(x_MD, weight_VD, targets)
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(logps_N, expected_N, atol=1e-5, rtol=1e-5)
    for _ in range(2):
        # The second backward pass has to recompute the logits.
        actual = torch.autograd.grad((logps_N * weights_N).sum(), (x_MD, weight_VD), retain_graph=True)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def test_without_scored_slots_there_is_no_value_and_no_gradient() -> None:
    x_MD, weight_VD = _inputs(torch.float32)
    none = torch.zeros(0, dtype=torch.int64)
    logps_N = score_targets(x_MD[:0], weight_VD, Targets(slot=none, token=none))
    assert logps_N.shape == (0,)
    logps_N.sum().backward()
    assert weight_VD.grad is not None
    assert not weight_VD.grad.any()


def test_a_frozen_head_has_no_gradient() -> None:
    x_MD, weight_VD = _inputs(torch.float32)
    score_targets(x_MD, weight_VD.detach(), Targets(slot=SLOTS, token=SLOTS)).sum().backward()
    assert x_MD.grad is not None
    assert weight_VD.grad is None


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_float32_logits_are_not_rounded_to_half_precision(temperature: float) -> None:
    """With half-precision inputs, float32 logits are as close to the exact product as full float32, unlike rounded
    ones."""
    targets = Targets(slot=SLOTS, token=torch.tensor([0, 2, 10, 4, 6, 4, 9]), temperature=temperature)
    x_MD, weight_VD = (tensor.detach() * 3 for tensor in _inputs(torch.bfloat16))
    exact_N = _plainly(x_MD.double(), weight_VD.double(), targets)
    rounded_N = score_targets(x_MD, weight_VD, targets)
    assert (rounded_N - exact_N).abs().max() > 1e-2
    x_MD, weight_VD = x_MD.requires_grad_(), weight_VD.requires_grad_()
    found_N = score_targets(x_MD, weight_VD, replace(targets, float32_head=True))
    torch.testing.assert_close(found_N, exact_N.float(), atol=1e-4, rtol=1e-5)
    found_N.sum().backward()
    wide = [tensor.detach().float().requires_grad_() for tensor in (x_MD, weight_VD)]
    _plainly(wide[0], wide[1], targets).sum().backward()
    for half, single in zip((x_MD, weight_VD), wide, strict=True):
        assert half.grad is not None
        torch.testing.assert_close(half.grad.float(), single.grad, atol=5e-2, rtol=2e-2)


def test_a_float32_head_changes_nothing_in_float32() -> None:
    x_MD, weight_VD = _inputs(torch.float32)
    targets = Targets(slot=SLOTS, token=SLOTS)
    plain_N, float32_N = (score_targets(x_MD, weight_VD, one) for one in (targets, replace(targets, float32_head=True)))
    assert torch.equal(plain_N, float32_N)
