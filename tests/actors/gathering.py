"""Stress test: two ranks load, gather and put weights repeatedly; `make gathers` does it 10,000 times."""

from __future__ import annotations

import os
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from torch import Tensor

from actors.cluster import WORKER_ENV
from actors.weights.tensors import make_manifest, verify
from learner.model.config import TransformerConfig
from learner.model.transformer import Transformer, init_weights
from learner.optimizer import PolicyOptimizer
from learner.parallel.sharding import ShardedPolicy, make_mesh

NUM_GATHERS = int(os.environ.get("D1_GATHERS", "10"))
_STATE_EVERY = 10
_PUTS_HELD = 3


def gather_and_put(rank: int, num_gathers: int, meeting: Path, address: str) -> None:
    """Run one rank. Raises AssertionError or ValueError if the weights received differ from those loaded."""
    torch.set_num_threads(1)
    os.environ |= WORKER_ENV
    if rank == 0:
        ray.init(address=address, namespace="d1", log_to_driver=False)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    model = Transformer(_uneven())
    init_weights(model, seed=0)
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    policy = ShardedPolicy(model, make_mesh("cpu"))
    optimizer = PolicyOptimizer(policy, betas=(0.9, 0.99), weight_decay=0.0)
    held: list[tuple[int, ray.ObjectRef]] = []
    for index in range(num_gathers):
        policy.load_full_weights(_scaled(start, index))
        gathered = policy.weights_on_rank_0()
        if index % _STATE_EVERY == 0:
            optimizer.load_full_state(_state(start, index))
            _assert_equal(optimizer.full_state(), _state(start, index) if rank == 0 else {})
        if rank:
            assert not gathered
            continue
        _assert_equal(gathered, _scaled(start, index))
        held = [*held[1 - _PUTS_HELD :], (index, ray.put(gathered))]
        for put_at, reference in held:
            # Later loads and gathers must not change earlier objects.
            verify(make_manifest(put_at, _scaled(start, put_at)), ray.get(reference))
    dist.barrier()
    dist.destroy_process_group()


def _uneven() -> TransformerConfig:
    """A config whose matrices have odd row counts, which two ranks share unequally."""
    return TransformerConfig(
        vocab_size=9,
        d_model=6,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        mlp_hidden_size=7,
        max_sequence_length=8,
        mask_token_id=6,
        eos_token_id=7,
        pad_token_id=7,
    )


def _scaled(weights: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    return {name: weight * (1 + index % 7) for name, weight in weights.items()}


def _state(weights: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    moments = {f"{name}/{key}": weight + index for name, weight in weights.items() for key in ("exp_avg", "exp_avg_sq")}
    return moments | {f"{name}/step": torch.tensor(float(index)) for name in weights}


def _assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
