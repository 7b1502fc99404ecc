"""Approximate KV caches: the sampler computes exactly the approximation that each cache defines."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.replay import replay
from learner.model.kv_cache import KeysValues
from learner.model.networks import make_model
from learner.model.transformer import Transformer, init_weights
from rollout.config import EngineConfig
from rollout.request import Cache, Completion, Request, SamplingParams
from rollout.sampler import Sampler
from tests.rollout.slow import Slow, sample

BASE: dict[str, Any] = {"gen_length": 16, "block_length": 8, "num_denoise_steps": 8, "temperature": 1.0}


class _FrozenLayer:
    """Keys and values of one transformer block; at frozen columns they are those of the last whole forward."""

    def __init__(self) -> None:
        self.held: tuple[Tensor, Tensor] | None = None
        self.frozen: Tensor | None = None

    def update(self, columns: Tensor | None, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.frozen is None:
            self.held = keys, values
            return keys, values
        keep = self.frozen[None, None, :, None]
        return torch.where(keep, self.held[0], keys), torch.where(keep, self.held[1], values)


class _SlowCache:
    """Slow reference of a KV cache: computes the whole canvas every time, then substitutes frozen keys and values."""

    def __init__(self, policy: Transformer, params: SamplingParams, prompt_length: int) -> None:
        self.policy, self.config, self.params, self.start = policy, policy.config, params, prompt_length
        self.layers = [_FrozenLayer() for _ in policy.blocks]
        self.block, self.step = -1, 0

    def layer(self, index: int) -> _FrozenLayer:
        return self.layers[index]

    def __call__(self, ids: Tensor) -> Tensor:
        self.width = ids.shape[1]
        masked = (ids[0, self.start :] == self.config.mask_token_id).nonzero()[:, 0]
        block = int(masked[0]) // self.params.block_length
        self.step = self.step + 1 if block == self.block else 0
        self.block = block
        every = self.params.cache_refresh_steps
        is_whole = self.step == 0 or (every and self.step % every == 0)
        columns = torch.arange(self.width)
        begin = int(self.policy.predicting_columns(torch.tensor(self.start + block * self.params.block_length)))
        end = self.start + (block + 1) * self.params.block_length
        frozen = columns < begin
        if self.params.cache is Cache.DUAL:
            frozen |= columns >= end
        for layer in self.layers:
            layer.frozen = None if is_whole else frozen
        return self.policy(ids, kv_cache=self)


def _requests(params: SamplingParams) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    prompts = [tuple(torch.randint(0, 38, (length,), generator=generator).tolist()) for length in (3, 9, 5, 9, 1)]
    return [Request(prompt_ids=prompt, params=params, seed=100 + i) for i, prompt in enumerate(prompts)]


@pytest.fixture(params=["llada", "dream"])
def either(request: pytest.FixtureRequest, policy: Transformer) -> Transformer:
    model = make_model(
        policy.config.model_copy(
            update={
                "family": request.param,
                "qkv_bias": request.param == "dream",
                "predicts_next": request.param == "dream",
            }
        )
    )
    init_weights(model, seed=3)
    with torch.no_grad():
        model.head.weight.mul_(4.0)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {"cache": "prefix"},
        {"cache": "dual"},
        {"cache": "dual", "cache_refresh_steps": 3},
        {"cache": "prefix", "threshold": 0.3},
        {"cache": "dual", "entropy_bound": 1.0},
    ],
)
def test_a_cached_step_attends_to_the_last_full_forwards_keys(either: Transformer, changes: dict[str, object]) -> None:
    params = SamplingParams(**BASE | changes)
    requests = _requests(params)
    # Three slots: rows are at different steps of their blocks, so a step mixes whole and cached forwards.
    completions = Sampler(either, 0, EngineConfig(num_slots=3)).generate(requests)
    for request, completion in zip(requests, completions, strict=True):
        slow: Slow = sample(_SlowCache(either, params, len(request.prompt_ids)), request)  # type: ignore[arg-type]
        denoised = len(completion.token_ids)
        assert completion.token_ids.tolist() == slow.tokens[:denoised]
        assert completion.step_map.tolist() == slow.step_map[:denoised]
        assert completion.commit_logp == pytest.approx(slow.logp[:denoised], abs=2e-5)
        assert not completion.exact


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_cache_refreshed_at_every_step_is_exact(policy: Transformer, cache: str) -> None:
    exact = _requests(SamplingParams(**BASE))
    cached = _requests(SamplingParams(**BASE, cache=cache, cache_refresh_steps=1))
    for one, other in zip(Sampler(policy, 0).generate(exact), Sampler(policy, 0).generate(cached), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.commit_logp, other.commit_logp, atol=1e-5)


def test_cached_and_exact_rows_share_a_batch(policy: Transformer) -> None:
    kinds = [SamplingParams(**BASE), SamplingParams(**BASE, cache="dual"), SamplingParams(**BASE, cache="prefix")]
    requests = [replace(_requests(kinds[0])[index % 5], params=kinds[index % 3], seed=index) for index in range(9)]
    sampler = Sampler(policy, 0, EngineConfig(num_slots=4))
    for request, completion in zip(requests, sampler.generate(requests), strict=True):
        (alone,) = Sampler(policy, 0).generate([request])
        assert alone.token_ids.tolist() == completion.token_ids.tolist()
        np.testing.assert_allclose(alone.commit_logp, completion.commit_logp, atol=1e-5)
        assert completion.exact == (request.params.cache is Cache.NONE)


def test_replay_differs_only_with_an_approximate_cache(policy: Transformer) -> None:
    for cache, exact in (("none", True), ("dual", False)):
        request = _requests(SamplingParams(**BASE, cache=cache))[1]
        (completion,) = Sampler(policy, 0).generate([request])
        difference = np.abs(completion.commit_logp - replay(policy, request, completion).logp).max()
        assert (difference < 1e-5) == exact


def test_a_cached_step_runs_fewer_tokens(policy: Transformer) -> None:
    tokens = {}
    for cache in ("none", "prefix", "dual"):
        sampler = Sampler(policy, 0)
        sampler.generate([_requests(SamplingParams(**BASE, cache=cache, stop_ids=()))[1]])
        tokens[cache] = sampler.counts.num_tokens
    # 8 steps over 9 + 16 columns: 2 whole forwards, and 6 over a block of 8 or over all columns from the block on.
    assert tokens == {"none": 8 * 25, "prefix": 2 * 25 + 3 * 16 + 3 * 8, "dual": 2 * 25 + 6 * 8}


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_the_completions_of_a_problem_share_the_first_whole_forward(policy: Transformer, cache: str) -> None:
    requests = _requests(SamplingParams(**BASE, cache=cache, stop_ids=()))[:2]
    requests += [replace(requests[1], seed=seed) for seed in range(10, 13)]
    sampler, alone = Sampler(policy, 0), Sampler(policy, 0)
    for request, completion in zip(requests, sampler.generate(requests), strict=True):
        (by_itself,) = alone.generate([request])
        assert by_itself.token_ids.tolist() == completion.token_ids.tolist()
        np.testing.assert_allclose(by_itself.commit_logp, completion.commit_logp, atol=1e-5)
    # More where completions are still equal at the next block.
    assert sampler.counts.num_rows <= alone.counts.num_rows - 3


def test_each_layers_kv_cache_has_its_own_storage(policy: Transformer) -> None:
    """When a tensor is written to, a compiler copies everything in its storage: with shared storage, all blocks for
    each block."""
    params = SamplingParams(**BASE, cache=Cache.DUAL)
    batch = Sampler(policy, 0).open([Request(prompt_ids=(3, 4), params=params, seed=0)])
    for _ in range(3):
        batch.step()
    # Also after the cache has grown.
    batch.submit(Request(prompt_ids=(3,) * 9, params=params, seed=1))
    batch.step()
    held = [tensor for of_block in batch._forwards._kv_cache for tensor in of_block]
    assert len({tensor.untyped_storage().data_ptr() for tensor in held}) == len(held) == 2 * policy.config.num_layers


def _drawn(completions: Sequence[Completion]) -> list[Any]:
    return [(completion.token_ids.tolist(), completion.commit_logp.tolist()) for completion in completions]


def _addresses(memory: Sequence[KeysValues]) -> list[int]:
    return [tensor.data_ptr() for of_block in memory for tensor in of_block]


@pytest.fixture
def as_if_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the actual compilation, which takes a minute."""
    monkeypatch.setattr("rollout.sampler._compiled", lambda model: model)


@pytest.mark.usefixtures("as_if_compiled")
@pytest.mark.parametrize("cache", [Cache.PREFIX, Cache.DUAL])
def test_a_compiled_policys_kv_cache_keeps_its_addresses(policy: Transformer, cache: Cache) -> None:
    """A CUDA graph writes to the addresses it was captured with, so the KV cache must keep them across batches."""
    params = SamplingParams(**BASE, cache=cache, stop_ids=())
    batches = [[(3, 4), (5,) * 9], [(6,)], [(7, 8), (9,)], [(4,) * 9]]
    requests = [[Request(prompt_ids=ids, params=params, seed=0) for ids in batch] for batch in batches]
    sampler = Sampler(policy, 0, EngineConfig(compile=True))
    found, addresses = [], []
    for batch in requests:
        found.append(sampler.generate(batch))
        addresses.append(_addresses(sampler._kv_cache))
    assert addresses == [addresses[0]] * len(batches)
    assert addresses[0]
    assert {getattr(keys, "_dynamo_static_input_type", None) for keys, _ in sampler._kv_cache} == {"unguarded"}
    # Stale entries of an earlier batch must not affect a later one.
    alone = [Sampler(policy, 0, EngineConfig(compile=True)).generate(batch) for batch in requests]
    assert list(map(_drawn, found)) == list(map(_drawn, alone))
    # The cache grows with the batch, and then keeps its address.
    wider = [Request(prompt_ids=(3,) * 20, params=params, seed=seed) for seed in range(3)]
    fresh = Sampler(policy, 0, EngineConfig(compile=True))
    assert _drawn(sampler.generate(wider)) == _drawn(fresh.generate(wider))
    grown = _addresses(sampler._kv_cache)
    assert grown != addresses[0]
    sampler.generate(requests[0])
    assert _addresses(sampler._kv_cache) == grown


@pytest.mark.usefixtures("as_if_compiled")
def test_a_kv_cache_written_by_bad_weights_does_not_affect_the_next_version(policy: Transformer) -> None:
    params = SamplingParams(**BASE, cache=Cache.DUAL, stop_ids=())
    model, engine = copy.deepcopy(policy), EngineConfig(compile=True, num_slots=2)
    sampler = Sampler(model, 0, engine)
    with torch.no_grad():
        model.embed.weight[3] = torch.nan
    with pytest.raises(FloatingPointError):
        sampler.generate([Request(prompt_ids=(3,) * 40, params=params, seed=row) for row in range(2)])
    model.load_state_dict(policy.state_dict())
    # The third enters during the first and widens the canvas by columns that the first never wrote.
    short = params.model_copy(update={"num_denoise_steps": 2})
    asked = ((2, params), (2, short), (40, params))
    requests = [Request(prompt_ids=(4,) * length, params=steps, seed=0) for length, steps in asked]
    fresh = Sampler(policy, 0, engine)
    assert _drawn(sampler.generate(requests)) == _drawn(fresh.generate(requests))


@pytest.mark.usefixtures("as_if_compiled")
def test_nested_batches_do_not_share_a_kv_cache(policy: Transformer) -> None:
    params = SamplingParams(**BASE, cache=Cache.DUAL, stop_ids=())
    ours, theirs = (
        [
            Request(prompt_ids=ids, params=params.model_copy(update={"num_denoise_steps": steps}), seed=0)
            for steps in (2, 8)
        ]
        for ids in ((3, 4), (5, 6))
    )
    sampler, within = Sampler(policy, 0, EngineConfig(compile=True)), []
    found = sampler.generate(ours, lambda index, _: within.append(sampler.generate(theirs)) if index == 0 else None)
    assert _drawn(found) == _drawn(Sampler(policy, 0).generate(ours))
    assert _drawn(within[0]) == _drawn(Sampler(policy, 0).generate(theirs))


def test_an_eager_policy_keeps_no_kv_cache_between_batches(policy: Transformer) -> None:
    sampler = Sampler(policy, 0)
    sampler.generate([Request(prompt_ids=(3, 4), params=SamplingParams(**BASE, cache=Cache.DUAL), seed=0)])
    assert sampler._kv_cache == []


@pytest.mark.usefixtures("as_if_compiled")
def test_a_kv_cache_grows_layer_by_layer(policy: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Growing must never hold two whole KV caches at once."""
    params = SamplingParams(**BASE, cache=Cache.DUAL, stop_ids=())
    sampler = Sampler(policy, 0, EngineConfig(compile=True))
    sampler.generate([Request(prompt_ids=(3, 4), params=params, seed=0)])
    before = [weakref.ref(keys) for keys, _ in sampler._kv_cache]
    mark, num_alive = torch._dynamo.mark_static_address, []

    def marked(memory: Tensor, *, guard: bool) -> None:
        num_alive.append(sum(one() is not None for one in before))
        mark(memory, guard=guard)

    monkeypatch.setattr(torch._dynamo, "mark_static_address", marked)
    sampler.generate([Request(prompt_ids=(3, 4), params=params, seed=seed) for seed in range(2)])
    # Keys and values of each block; the old ones are freed before the next block's are allocated.
    assert num_alive == [count for left in range(len(before), 0, -1) for count in (left, left)]
