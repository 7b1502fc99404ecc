"""Log-probabilities in chunks against autograd's own, kept and computed again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from learner.model import scoring
from learner.model.scoring import Wanted, wanted_logps

SLOTS = torch.tensor([0, 0, 1, 4, 4, 4, 6])


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_MD, weight_VD = (torch.randn(size, 5, generator=generator) for size in (7, 11))
    return x_MD.to(dtype).requires_grad_(), weight_VD.to(dtype).requires_grad_()


def _plainly(x_MD: Tensor, weight_VD: Tensor, wanted: Wanted) -> Tensor:
    logits_MV = (x_MD @ weight_VD.T).float() / wanted.temperature
    if wanted.forbidden_id is not None:
        logits_MV = logits_MV.index_fill(1, torch.tensor([wanted.forbidden_id]), -torch.inf)
    return logits_MV.log_softmax(dim=-1)[wanted.slot, wanted.token]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("temperature", "forbidden_id"), [(1.0, None), (0.7, 3)])
@pytest.mark.parametrize(("chunk", "kept"), [(1000, 1000), (22, 1000), (22, 0), (44, 0)])
def test_values_and_gradients_are_autograds(
    chunk: int,
    kept: int,
    temperature: float,
    forbidden_id: int | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scoring, "_MOST_LOGITS_CPU", chunk)
    monkeypatch.setattr(scoring, "_MOST_KEPT_CPU", kept)
    token = torch.tensor([0, 0, 10, 4, 5, 4, 9])
    wanted = Wanted(slot=SLOTS, token=token, temperature=temperature, forbidden_id=forbidden_id)
    weights_N = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, 1.0, -1.0])
    x_MD, weight_VD = _inputs(dtype)
    expected_N = _plainly(x_MD, weight_VD, wanted)
    expected = torch.autograd.grad((expected_N * weights_N).sum(), (x_MD, weight_VD))
    logps_N = wanted_logps(x_MD, weight_VD, wanted)
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(logps_N, expected_N, atol=1e-5, rtol=1e-5)
    for _ in range(2):
        # The second backward finds nothing kept.
        actual = torch.autograd.grad((logps_N * weights_N).sum(), (x_MD, weight_VD), retain_graph=True)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def test_where_nothing_is_scored_there_is_no_value_and_no_gradient() -> None:
    x_MD, weight_VD = _inputs(torch.float32)
    none = torch.zeros(0, dtype=torch.int64)
    logps_N = wanted_logps(x_MD[:0], weight_VD, Wanted(slot=none, token=none))
    assert logps_N.shape == (0,)
    logps_N.sum().backward()
    assert weight_VD.grad is not None
    assert not weight_VD.grad.any()


def test_a_frozen_head_has_no_gradient() -> None:
    x_MD, weight_VD = _inputs(torch.float32)
    wanted_logps(x_MD, weight_VD.detach(), Wanted(slot=SLOTS, token=SLOTS)).sum().backward()
    assert x_MD.grad is not None
    assert weight_VD.grad is None
