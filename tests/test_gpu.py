"""The same classes on a GPU: what they compute there is what they compute on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from benchmarks.models import Shape
from benchmarks.rounds import Setting, make_round
from learner.config import LearnerConfig
from learner.counter import uniform
from learner.learner import Learner
from learner.model.transformer import Transformer
from learner.parallel.sharding import ShardedPolicy
from rollout.config import EngineConfig
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_draws_are_the_same_bits() -> None:
    keys = torch.arange(100_000)
    assert torch.equal(uniform(torch.tensor(7).cuda(), keys.cuda(), 3).cpu(), uniform(torch.tensor(7), keys, 3))


def test_greedy_completions_are_the_same_tokens(policy: Transformer) -> None:
    params = SamplingParams(gen_length=16, block_length=8, num_denoise_steps=8, temperature=0.0)
    requests = [Request(prompt_ids=tuple(range(1, 2 + row)), params=params, seed=row) for row in range(8)]
    on_cpu = Sampler(policy, 0).generate(requests)
    on_gpu = Sampler(copy.deepcopy(policy).cuda(), 0).generate(requests)
    assert [c.token_ids.tolist() for c in on_gpu] == [c.token_ids.tolist() for c in on_cpu]


@pytest.mark.parametrize(
    "changes",
    [
        {"threshold": 0.3},
        {"factor": 1.1},
        {"entropy_bound": 1.5},
        {"schedule": "random"},
        {"temperature": 0.8, "top_p": 0.7, "top_k": 9},
        {"cfg_scale": 1.0},
        {"cache": "dual", "cache_refresh_steps": 3},
        {"cache": "prefix"},
        {"drawing": "sample_then_select", "temperature": 0.7},
        {"forbidden_ids": (1, 2, 3)},
    ],
)
@pytest.mark.parametrize("engine", [EngineConfig(num_slots=3), EngineConfig(num_slots=3, steps_per_sync=4)])
def test_requests_of_every_kind_are_the_same_text(
    policy: Transformer, changes: dict[str, Any], engine: EngineConfig
) -> None:
    base: dict[str, Any] = {"gen_length": 16, "block_length": 8, "num_denoise_steps": 8, "temperature": 0.0}
    params = SamplingParams(**base | changes)
    requests = [Request(prompt_ids=tuple(range(1, 2 + row)), params=params, seed=row) for row in range(8)]
    on_cpu = Sampler(policy, 0).generate(requests)
    on_gpu = Sampler(copy.deepcopy(policy).cuda(), 0, engine).generate(requests)
    assert [c.token_ids.tolist() for c in on_gpu] == [c.token_ids.tolist() for c in on_cpu]
    for one, other in zip(on_gpu, on_cpu, strict=True):
        assert one.commit_logp == pytest.approx(other.commit_logp, abs=1e-3)


def test_a_compiled_policy_in_bfloat16_samples_what_it_samples_eagerly(policy: Transformer) -> None:
    half = copy.deepcopy(policy).to("cuda", torch.bfloat16)
    params = SamplingParams(gen_length=16, block_length=8, num_denoise_steps=8, temperature=0.0)
    requests = [Request(prompt_ids=(3, 4, 5), params=params, seed=row) for row in range(4)]
    eager = Sampler(half, 0).generate(requests)
    compiled = Sampler(half, 0, EngineConfig(compile=True)).generate(requests)
    same = [one.token_ids == other.token_ids for one, other in zip(eager, compiled, strict=True)]
    assert sum(map(float, (row.mean() for row in same))) / 4 > 0.9, "fusion rounds otherwise"


def test_an_update_is_the_same_step(policy: Transformer) -> None:
    shape = Shape(d_model=32, num_layers=2, num_heads=4, vocab_size=38)
    batch = make_round(Setting(shape=shape, prompt_tokens=6, gen_length=8, num_groups=2, group_size=4))
    config = LearnerConfig(
        num_rounds=1, group_size=4, groups_per_round=2, inner_updates=2, micro_batch_tokens=60, lr=1e-3
    )
    on_gpu = copy.deepcopy(policy).cuda()
    metrics = [Learner(ShardedPolicy(model, None), config).update(batch, 0) for model in (policy, on_gpu)]
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-2, abs=1e-4)
    for name, tensor in policy.named_parameters():
        torch.testing.assert_close(on_gpu.get_parameter(name).cpu(), tensor, atol=1e-4, rtol=1e-3, msg=name)
