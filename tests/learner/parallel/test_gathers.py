"""Collectives of the learner: only ones whose names gloo cannot free twice, and the result of gathers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from learner.batch import RolloutBatch
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.model.config import TransformerConfig
from learner.model.transformer import Transformer, init_weights
from learner.parallel.consensus import Ranks
from learner.parallel.sharded_tensors import gather_on_rank_0, gathered
from learner.parallel.sharding import ShardedPolicy, make_mesh
from learner.sft.config import SftConfig
from learner.sft.documents import Documents
from learner.sft.learner import SftLearner, evaluation_loss
from tests.ranks import run_ranks

# ALLREDUCE, ALLGATHER and BROADCAST on gloo. Longer names than 15 characters are on the heap, where two
# threads may free them.
OF_SHORT_NAMES = {
    "_c10d_functional.all_reduce",
    "_c10d_functional._wrap_tensor_autograd",
    "c10d.allreduce_",
    "c10d._allgather_base_",
    "c10d.broadcast_",
    "c10d._reduce_scatter_base_",
    "c10d.monitored_barrier_",
}
SHAPES = ((1,), (2,), (5,), (8,), (3, 4), (4, 3), (7, 2, 3))


class Collectives(TorchDispatchMode):
    """Records the collectives requested within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # Its local tensors are dispatched here again.
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.add(f"{func.namespace}.{func._opname}")
        return func(*args, **(kwargs or {}))


def _collectives(
    rank: int, workers_per_copy: int, meeting: Path, config: TransformerConfig, batch: RolloutBatch, out: Path
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    model = Transformer(config)
    init_weights(model, seed=0)
    with Collectives() as seen:
        policy = ShardedPolicy(model, make_mesh("cpu", workers_per_copy))
        documents = Documents(
            ids=torch.cat((batch.prompt_ids, batch.completion_ids), dim=1),
            prompt_lengths=batch.prompt_lengths,
            lengths=batch.prompt_lengths + batch.completion_lengths,
            sample_keys=batch.sample_keys,
        )
        SftLearner(policy, SftConfig(num_labels=12, num_steps=1, batch_size=5, num_warmup_steps=0), documents, 0).step(
            0, 1e-3
        )
        evaluation_loss(policy, documents, batch_size=4)
        learner = Learner(policy, LearnerConfig(num_rounds=1, group_size=4, groups_per_round=3))
        learner.update(batch, 0)
        policy.barrier("the end", timeout_s=60)
        ranks = Ranks()
        ranks.broadcast_decision(lambda: 1)
        ranks.broadcast_tensors(lambda: (None, {"ids": batch.prompt_ids}))
        learner.load_full_state(learner.full_state())
        policy.load_full_weights(policy.full_weights())
    if rank == 0:
        torch.save(sorted(seen.names), out)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("workers_per_copy", [0, 1])
def test_all_collectives_have_short_names_on_gloo(
    config: TransformerConfig, rollouts: RolloutBatch, tmp_path: Path, workers_per_copy: int
) -> None:
    out = tmp_path / "out.pt"
    run_ranks(_collectives, workers_per_copy, tmp_path / "meeting", config, rollouts, out, num=2)
    seen = set(torch.load(out, weights_only=True))
    assert seen
    assert seen <= OF_SHORT_NAMES


def _whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {str(shape): torch.rand(shape, generator=generator) for shape in SHAPES}


def _gathers(rank: int, world_size: int, meeting: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    mesh = make_mesh("cpu")
    assert mesh is not None
    sharded = {name: distribute_tensor(whole, mesh, [Shard(0)]) for name, whole in _whole().items()}
    found = gather_on_rank_0(rank, sharded)
    for name, whole in _whole().items():
        torch.testing.assert_close(gathered(sharded[name]), whole, rtol=0, atol=0, msg=name)
        if rank == 0:
            torch.testing.assert_close(found[name], whole, rtol=0, atol=0, msg=name)
            assert found[name].untyped_storage().nbytes() == whole.nbytes, "no row that only filled a shard"
    dist.destroy_process_group()


def test_a_gather_handles_every_sharding_of_rows(tmp_path: Path) -> None:
    run_ranks(_gathers, 3, tmp_path / "meeting", num=3)
