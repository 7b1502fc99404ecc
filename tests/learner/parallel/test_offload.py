"""Offloading frees the device and restores bit-identical state, on a simulated GPU and with FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.models import Shape
from benchmarks.rounds import Setting, make_round
from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.model.lora_config import LoraConfig
from learner.model.transformer import Transformer
from learner.parallel.offload import offloaded
from learner.parallel.sharded_tensors import local_part
from learner.parallel.sharding import ShardedPolicy, make_mesh
from learner.parallel.sharding_config import ShardingConfig
from tests.ranks import run_ranks
from tests.simulated.stand_in_gpu import bytes_there, stand_in_gpu

LORAS = {"whole": LoraConfig(), "adapter": LoraConfig(rank=4, alpha=8)}
RL = LearnerConfig(num_rounds=2, group_size=4, groups_per_round=2, inner_updates=2, micro_batch_tokens=120, lr=1e-3)


def _round() -> RolloutBatch:
    shape = Shape(d_model=32, num_layers=2, num_heads=4, vocab_size=38)
    return make_round(Setting(shape=shape, prompt_tokens=6, gen_length=8, num_groups=2, group_size=4))


def _sleeping(learner: Learner) -> AbstractContextManager[None]:
    return offloaded(chain(learner.policy.tensors(), learner.tensors()), learner.policy.device)


def _updates(learner: Learner, *, is_sleeping: bool) -> Iterator[Any]:
    """Run two updates with a pause between them; yield the learner's final state last."""
    yield learner.update(_round(), 0)
    with _sleeping(learner) if is_sleeping else nullcontext():
        yield "asleep"
    yield learner.update(_round(), 1)
    yield learner.full_state() | learner.policy.weights_on_rank_0()


def _assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert found[:-1] == expected[:-1], "metrics"
    assert found[-1].keys() == expected[-1].keys()
    for name, tensor in expected[-1].items():
        assert torch.equal(found[-1][name].cpu(), tensor.cpu()), name


@pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS)
def test_an_offloaded_learner_holds_no_gpu_memory(policy: Transformer, lora: LoraConfig) -> None:
    with stand_in_gpu():
        before = bytes_there()
        learner = Learner(ShardedPolicy(copy.deepcopy(policy).cuda(), None, lora=lora), RL)
        found = []
        for what in _updates(learner, is_sleeping=True):
            assert (bytes_there() > before) == (what != "asleep")
            found.append(what)
        other = Learner(ShardedPolicy(copy.deepcopy(policy).cuda(), None, lora=lora), RL)
        _assert_equal(found, list(_updates(other, is_sleeping=False)))


def test_offloading_accepts_a_device_without_an_index(policy: Transformer) -> None:
    with stand_in_gpu():
        before = bytes_there()
        on_gpu = copy.deepcopy(policy).cuda()
        with offloaded(on_gpu.parameters(), torch.device("cuda")):
            assert bytes_there() == before
        assert torch.equal(on_gpu.head.weight.cpu(), policy.head.weight)


def _rank(rank: int, policy: Transformer, lora: LoraConfig, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/port", rank=rank, world_size=2)
    ends = []
    for is_sleeping in (True, False):
        sharding = ShardingConfig(compute_dtype="bfloat16")
        sharded = ShardedPolicy(copy.deepcopy(policy), make_mesh("cpu"), sharding, lora=lora)
        learner, found = Learner(sharded, RL), []
        for what in _updates(learner, is_sleeping=is_sleeping):
            if what == "asleep" and is_sleeping:
                held = [local_part(tensor) for tensor in chain(sharded.tensors(), learner.tensors())]
                assert len(held) > 10
                assert {tensor.untyped_storage().nbytes() for tensor in held} == {0}
            found.append(what)
        ends.append(found)
    _assert_equal(*ends)
    dist.destroy_process_group()


@pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS)
def test_shards_are_restored_after_offloading(policy: Transformer, lora: LoraConfig, tmp_path: Path) -> None:
    run_ranks(_rank, policy, lora, tmp_path, num=2)


def test_offloaded_parameters_are_restored_after_an_error(policy: Transformer) -> None:
    weight = policy.blocks[0].mlp.up_proj.weight
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match="meanwhile"), offloaded(policy.parameters(), torch.device("cpu")):
        raise RuntimeError("meanwhile")
    assert torch.equal(weight, before)
