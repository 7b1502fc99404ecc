"""Rows of unequal length packed without padding give the same results as padded rows."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import varlen as torch_varlen
from torch.utils.flop_counter import FlopCounterMode

from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import SamplerFacts, Views, token_logps
from learner.learner import Learner
from learner.model.attention import varlen
from learner.model.attention.rows import RowLengths
from learner.model.config import Family, TransformerConfig
from learner.model.networks import make_model
from learner.model.transformer import Transformer, init_weights
from learner.parallel import sharding
from learner.parallel.micro_batches import make_micro_batches
from learner.parallel.sharding import ShardedPolicy
from learner.parallel.sharding_config import ShardingConfig
from learner.round import Round
from tests.learner.methods.test_algorithms import algorithm_config, algorithm_sampler, gradients_of_two_steps

LENGTHS = {
    "of all lengths": [12, 3, 9, 1, 7, 12],
    "one row": [9],
    "equal": [8, 8, 8],
    "one is longer": [2, 2, 12],
}


@pytest.fixture
def unpadded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable packing without padding on the CPU, where it runs row by row."""
    monkeypatch.setattr(sharding, "has_kernel", lambda *_: True)


def _policy(config: TransformerConfig, family: Family, kv_heads: int) -> Transformer:
    model = make_model(
        config.model_copy(update={"family": family, "predicts_next": family == "dream", "num_kv_heads": kv_heads})
    )
    init_weights(model, seed=0)
    return model


def _views(lengths: list[int], *, width: int = 12) -> Views:
    """Query every other slot of the canvases, including the first and last, but none of the second row."""
    generator, lengths_V = torch.Generator().manual_seed(len(lengths)), torch.tensor(lengths)
    columns_S = torch.arange(width)
    is_asked = (columns_S < lengths_V[:, None]) & ((columns_S % 2 == 0) | (columns_S == lengths_V[:, None] - 1))
    is_asked[1:2] = False
    slots = is_asked.flatten().nonzero()[:, 0]
    ids = torch.randint(0, 38, (len(lengths), width), generator=generator)
    # Some slots are scored twice, in random order.
    scored = torch.randint(0, len(slots), (2 * len(slots),), generator=generator)
    return Views(
        ids=ids[:, : max(lengths)],
        lengths=lengths_V,
        slots=slots // width * max(lengths) + slots % width,
        scored=scored,
        targets=torch.randint(0, 38, scored.shape, generator=generator),
    )


def _logps_and_gradients(model: Transformer, views: Views) -> dict[str, Tensor]:
    model.zero_grad()
    logps_N = token_logps(model, views)
    (logps_N * torch.linspace(-1, 1, len(logps_N))).sum().backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return {"logps": logps_N.detach(), **gradients}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_packed_rows_have_the_log_probs_and_gradients_of_padded_ones(
    config: TransformerConfig, family: Family, kv_heads: int, lengths: list[int]
) -> None:
    model, views = _policy(config, family, kv_heads), _views(lengths)
    padded, given = _logps_and_gradients(model, views), []
    hook = model.register_forward_pre_hook(lambda *given_to: given.append(given_to[1:]), with_kwargs=True)
    found = _logps_and_gradients(model, replace(views, concatenates_rows=True))
    hook.remove()
    ((ids, *_), beside), is_ragged = given[0], len(set(lengths)) > 1
    assert ids.shape == ((1, sum(lengths)) if is_ragged else views.ids.shape)
    if is_ragged:
        ends = beside["ragged"].tokens.ends
        assert (ends.tolist(), ends.dtype) == ([0, *accumulate(lengths)], torch.int32)
    assert found.keys() == padded.keys()
    for name, expected in padded.items():
        assert torch.equal(found[name], expected) or is_ragged, "rows of one length are what they were, to the bit"
        torch.testing.assert_close(found[name], expected, atol=1e-5, rtol=1e-5, msg=name)


def test_without_scored_slots_the_result_is_empty(policy: Transformer) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    views = replace(_views([4, 2]), slots=nothing, scored=nothing, targets=nothing, concatenates_rows=True)
    assert token_logps(policy, views).shape == (0,)


def test_the_length_limit_is_per_row(policy: Transformer) -> None:
    views = replace(_views([40, 60, 60], width=60), concatenates_rows=True)
    assert token_logps(policy, views).isfinite().all()
    with pytest.raises(ValueError, match="65 tokens exceeds max_sequence_length 64"):
        token_logps(policy, replace(_views([40, 60, 65], width=65), concatenates_rows=True))


def test_block_causal_and_compiled_policies_are_not_packed(policy: Transformer, unpadded: None) -> None:
    causal = make_model(policy.config.model_copy(update={"family": "sdar", "block_length": 4}))
    assert ShardedPolicy(policy, None).concatenates_rows
    assert not ShardedPolicy(causal, None).concatenates_rows
    # A compiler would see another number of rows in every micro-batch.
    assert not ShardedPolicy(policy, None, ShardingConfig(compile=True)).concatenates_rows


def test_rows_are_packed_only_on_a_gpu_in_half_precision(policy: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, half = torch.device("cuda", 0), torch.bfloat16
    assert not ShardedPolicy(policy, None).concatenates_rows, "CPUs keep the bits of their losses"
    with monkeypatch.context() as asked:
        asked.setattr(sharding, "has_kernel", lambda _device, dtype, head_dim: (dtype, head_dim) == (half, 8))
        assert not ShardedPolicy(policy, None).concatenates_rows
        assert ShardedPolicy(copy.deepcopy(policy).to(half), None).concatenates_rows
    assert not varlen.has_kernel(gpu, half, 64) or torch.cuda.is_available()
    for major, has_one in {7: False, 8: True, 9: True}.items():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        properties = type("Properties", (), {"major": major})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device, found=properties: found)
        assert varlen.has_kernel(gpu, half, 64) == has_one
        assert varlen.has_kernel(gpu, torch.float16, 256) == has_one
    unfit = [(torch.device("cpu"), half, 64), (gpu, torch.float32, 64), (gpu, half, 12), (gpu, half, 264)]
    assert not any(varlen.has_kernel(*one) for one in unfit)


@pytest.mark.parametrize("asks_about_groups", [True, False], ids=["torch 2.13", "torch 2.11"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["as many", "grouped"])
def test_the_kernel_gets_valid_arguments(
    heads: tuple[int, int], asks_about_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the arguments as torch's flash_api.cpp does; computed here in float32 from the row ends alone."""

    def asking(q: Tensor, k: Tensor, v: Tensor, *rest: Any, enable_gqa: bool = False) -> Tensor:
        assert enable_gqa == (q.shape[1] != k.shape[1])
        return kernel(q, k, v, *rest)

    def kernel(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        ends_q, ends_k, most_q, most_k = rest
        for x, ends, most in ((q, ends_q, most_q), (k, ends_k, most_k), (v, ends_k, most_k)):
            assert x.stride(-1) == 1
            assert ends.dtype is torch.int32
            assert ends.is_contiguous()
            assert (int(ends[0]), int(ends[-1]), len(ends)) == (0, len(x), 4)
            assert int(ends.diff().max()) <= most
            assert most > 1
        out = torch.empty_like(q)
        for row in range(3):
            asked, seen = slice(ends_q[row], ends_q[row + 1]), slice(ends_k[row], ends_k[row + 1])
            for head in range(q.shape[1]):
                of_head = head * k.shape[1] // q.shape[1]
                scores = q[asked, head] @ k[seen, of_head].T * q.shape[-1] ** -0.5
                out[asked, head] = scores.softmax(dim=-1) @ v[seen, of_head]
        return out

    def lengths(*each: int) -> RowLengths:
        return RowLengths.of(each, torch.tensor([0, *each]).cumsum(0).int())

    num_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 5, num_heads, 8, generator=generator).transpose(1, 2)
    k, v = (torch.randn(1, 12, kv_heads, 8, generator=generator).transpose(1, 2) for _ in range(2))
    rows = varlen.VarlenAttention(queries=lengths(4, 0, 1), keys=lengths(6, 1, 5))
    expected = rows.attend(q, k, v)
    monkeypatch.setattr(torch_varlen, "varlen_attn", asking if asks_about_groups else kernel)
    monkeypatch.setattr(varlen, "has_kernel", lambda *_: True)
    found = rows.attend(q, k, v)
    assert found.shape == q.shape
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_torch_accepts_the_kernels_arguments_and_differentiates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked by shapes, on meta tensors: the kernel itself runs only on a GPU (`tests/test_gpu.py`)."""
    monkeypatch.setattr(varlen, "has_kernel", lambda *_: True)
    ends = torch.tensor([0, 4, 4, 5], device="meta", dtype=torch.int32)
    rows = varlen.VarlenAttention(queries=RowLengths.of((4, 0, 1), ends), keys=RowLengths.of((6, 1, 5), ends))
    q, k, v = (
        torch.empty(1, heads, tokens, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for heads, tokens in ((4, 5), (2, 12), (2, 12))
    )
    found = rows.attend(q, k, v)
    assert (found.shape, found.dtype) == (q.shape, q.dtype)
    found.sum().backward()
    assert [x.grad is not None and x.grad.shape == x.shape for x in (q, k, v)] == [True] * 3


def test_micro_batches_count_tokens_without_padding(policy: Transformer, rollouts: RolloutBatch) -> None:
    batch = _of_many_lengths(rollouts)
    work = Round(ShardedPolicy(policy, None), algorithm_config("diffu-grpo"), algorithm_sampler("diffu-grpo"), batch)
    terms = work.plan(0).terms
    lengths = terms.views.lengths.tolist()
    assert len(set(lengths)) > 3
    most, counts = 4 * max(lengths) - 1, []
    for spares, tokens_of in ((False, lambda some: len(some) * max(some)), (True, sum)):
        micros = make_micro_batches(terms, terms.rows, most, concatenates_rows=spares).terms
        found = [micro.views.lengths.tolist() for micro in micros]
        assert list(chain.from_iterable(found)) == lengths
        assert {micro.views.concatenates_rows for micro in micros} == {spares}
        # Each is as full as possible: it keeps the limit, and the next one's first row would exceed it.
        assert all(tokens_of(some) <= most for some in found)
        assert all(tokens_of([*some, after[0]]) > most for some, after in pairwise(found))
        counts.append([len(some) for some in found])
    assert counts[0] != counts[1], "where there is padding fewer fit"


def _of_many_lengths(rollouts: RolloutBatch) -> RolloutBatch:
    """The fixture with prompts of one to six tokens."""
    lengths = torch.tensor([1, 4, 6, 2, 5, 3]).repeat_interleave(2)
    prompts = torch.where(torch.arange(6) < lengths[:, None], rollouts.prompt_ids, 39)
    return replace(rollouts, prompt_lengths=lengths, prompt_ids=prompts)


@pytest.mark.parametrize("name", ["diffu-grpo", "spg", "cj-grpo"])
def test_micro_batch_sizes_do_not_change_gradients(
    name: str, policy: Transformer, rollouts: RolloutBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two steps, with new, old and reference likelihoods."""
    batch = _of_many_lengths(rollouts)
    padded = gradients_of_two_steps(policy, algorithm_config(name), batch, algorithm_sampler(name))
    monkeypatch.setattr(sharding, "has_kernel", lambda *_: True)
    for max_tokens in (14, 60):
        config = algorithm_config(name, micro_batch_tokens=max_tokens)
        found = gradients_of_two_steps(policy, config, batch, algorithm_sampler(name))
        for update, expected in enumerate(padded):
            for parameter, gradient in expected.items():
                scale = max(1e-3, float(gradient.abs().max()))
                difference = float((found[update][parameter] - gradient).abs().max())
                assert difference < 1e-4 * scale, (max_tokens, update, parameter)


def test_the_flops_of_a_ragged_update_equal_pytorchs_count(
    policy: Transformer, rollouts: RolloutBatch, unpadded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch counts padding too, so that `test_flops.py` has rows of one length."""
    monkeypatch.setattr("learner.learner.mask_variance", lambda *_: {})
    config = LearnerConfig.model_validate({"num_rounds": 1, "group_size": 4, "groups_per_round": 3, "inner_updates": 2})
    learner = Learner(ShardedPolicy(policy, None), config, SamplerFacts(has_reproducible_logps=False))
    # PyTorch does not count the CPU's fused kernels.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        learner.update(_of_many_lengths(rollouts), 0)
    assert learner.model_flops == pytest.approx(float(counter.get_total_flops()), rel=1e-12)
