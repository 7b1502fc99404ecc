"""iLLaDA, LLaDA-MoE and Fast-dLLM v2 from checkpoints as they are published: sampled, scored, trained and sharded."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from actors.spec import sampler_facts
from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.estimators import InnerUpdate, TrajectoryConfig, make_terms, token_logps
from learner.learner import Learner
from learner.model.adapter import Adapter
from learner.model.checkpoint import load_merged, load_policy, save_checkpoint
from learner.model.lora_config import FULL_FINE_TUNING, LoraConfig
from learner.model.transformer import Transformer
from learner.parallel.loading import load_by_rows
from learner.parallel.sharding import ShardedPolicy, make_mesh
from learner.parallel.sharding_config import ShardingConfig
from rollout.config import EngineConfig
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler
from tests.learner.batches import batch_of
from tests.published.tiny_published import FAMILIES, publish
from tests.ranks import run_ranks
from tests.rollout.slow import sample
from tests.rollout.test_sampler import _check_equal
from tests.test_likelihoods import _sampled

RL = LearnerConfig(num_rounds=1, group_size=4, groups_per_round=2, inner_updates=1, lr=1e-3)
LORA = LoraConfig(rank=4, alpha=8, targets=("q_proj", "out_proj"))
CPU = torch.device("cpu")


@pytest.fixture(params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    publish(tmp_path, request.param)
    return tmp_path / "model"


@pytest.fixture
def published(checkpoint: Path) -> Transformer:
    return load_policy(checkpoint)


def _rollouts() -> RolloutBatch:
    """Two groups, in blocks of four that begin where the prompts end."""
    generator = torch.Generator().manual_seed(7)
    return batch_of(
        prompts=torch.randint(4, 200, (2, 8), generator=generator).repeat_interleave(4, dim=0),
        completions=torch.randint(4, 200, (8, 8), generator=generator),
        lengths=torch.full((8,), 8),
        steps=torch.arange(8).expand(8, -1),
        rewards=torch.rand(8, generator=generator),
    )


def test_a_batch_equals_the_slow_sampler(published: Transformer) -> None:
    params = SamplingParams(gen_length=8, block_length=4, steps_per_block=2, temperature=1.0)
    prompts = [(5,) * length for length in (3, 8)]
    requests = [Request(prompt_ids=prompt, params=params, seed=seed) for seed, prompt in enumerate(prompts)]
    expected = [sample(published, request) for request in requests]
    for engine in (EngineConfig(), EngineConfig(block_cache=False)):
        for completion, slow in zip(Sampler(published, 0, engine).generate(requests), expected, strict=True):
            _check_equal(completion, slow)


def test_step_likelihoods_equal_the_samplers_record(published: Transformer) -> None:
    is_block_causal = published.config.is_block_causal
    batch, params = _sampled(published, steps_per_block=2)
    facts = sampler_facts(params, is_block_causal=is_block_causal)
    corruption = TrajectoryConfig(steps_per_segment=1, law="sampler").corrupt(batch, InnerUpdate(0, 1), facts)
    terms = make_terms(batch, published.config, corruption, params.block_length if is_block_causal else None)
    with torch.no_grad():
        logps = token_logps(published, terms.views, terms.distribution)
    np.testing.assert_allclose(logps, batch.commit_logp[terms.rows, terms.slots], atol=2e-5)


def test_an_adapter_is_trained_saved_and_merged(checkpoint: Path, published: Transformer, tmp_path: Path) -> None:
    base = copy.deepcopy(published.state_dict())
    policy, batch = ShardedPolicy(published, None, lora=LORA, seed=7), _rollouts()
    ids = batch.prompt_ids
    with torch.no_grad():
        before = policy.module(ids)
    Learner(policy, RL).update(batch, 0)
    with torch.no_grad():
        after = policy.module(ids)
    assert not torch.equal(before, after)
    with policy.disable_adapters():
        assert all(
            torch.equal(weight, base[name]) for name, weight in policy.module.state_dict().items() if name in base
        )
    adapter = Adapter(rank=LORA.rank, alpha=LORA.alpha, base="model", matrices=policy.adapter_on_rank_0())
    save_checkpoint(tmp_path / "adapted", policy.config, None, checkpoint, adapter=adapter)
    with torch.no_grad():
        torch.testing.assert_close(load_policy(tmp_path / "adapted")(ids), after, atol=1e-5, rtol=0)
        torch.testing.assert_close(load_merged(tmp_path / "adapted")(ids), after, atol=1e-5, rtol=0)


def _trained(directory: Path, mesh: DeviceMesh | None) -> dict[str, torch.Tensor]:
    policy = load_by_rows(directory, mesh, ShardingConfig(), device=CPU, lora=FULL_FINE_TUNING, seed=3)
    Learner(policy, RL).update(_rollouts(), 0)
    return policy.weights_on_rank_0()


def _rank(rank: int, port_file: str, directories: dict[str, Path], out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    mesh = make_mesh("cpu")
    found = {name: _trained(directory, mesh) for name, directory in directories.items()}
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


@pytest.mark.nightly
def test_training_on_two_ranks_equals_one(tmp_path: Path) -> None:
    directories = {name: tmp_path / name / "model" for name in FAMILIES}
    for name in FAMILIES:
        publish(tmp_path / name, name)
    run_ranks(_rank, str(tmp_path / "at"), directories, tmp_path / "out.pt", num=2)
    on_two = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, directory in directories.items():
        start, expected = load_policy(directory).state_dict(), _trained(directory, None)
        assert on_two[name].keys() == expected.keys() == start.keys()
        for parameter, tensor in expected.items():
            torch.testing.assert_close(on_two[name][parameter], tensor, atol=1e-4, rtol=1e-3, msg=parameter)
            assert not torch.equal(tensor, start[parameter])
