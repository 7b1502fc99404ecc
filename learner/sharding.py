"""FSDP2 behind one door: a policy that is whole on one process or sharded over many, with the same code.

Collectives run on gloo for CPUs and NCCL for GPUs. Every method that gathers is a collective: all ranks call it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from learner.model.families import make_model
from learner.model.transformer import Transformer


def make_mesh(device_type: str) -> DeviceMesh | None:
    """A one-dimensional mesh over all ranks; None where no process group runs (a single process)."""
    if not dist.is_initialized():
        return None
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("dp",))


class ShardedPolicy:
    """A transformer whose parameters are sharded over a mesh, block by block."""

    def __init__(self, model: Transformer, mesh: DeviceMesh | None) -> None:
        """Shard `model` in place over `mesh`; None leaves it whole. Every rank must pass equal weights."""
        self.config = model.config
        self.mesh = mesh
        self.rank = mesh.get_local_rank() if mesh is not None else 0
        self.world_size = mesh.size() if mesh is not None else 1
        self.module = model
        self._lobby: dist.ProcessGroup | None = None
        if mesh is not None:
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return next(self.module.parameters()).device

    def full_weights(self) -> dict[str, Tensor]:
        """Every parameter, whole, on the CPU, detached from the live ones."""
        return {name: full_tensor(parameter) for name, parameter in self.module.named_parameters()}

    def weights_on_rank_0(self) -> dict[str, Tensor]:
        """The same on rank 0 alone, empty on the others: what is written or sent once is held in memory once."""
        return gather_on_rank_0(self.rank, dict(self.module.named_parameters()))

    def load_full_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over whole parameters; `weights` has exactly the policy's names."""
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(shard_like(weights[name], parameter))

    def frozen_copy(self, weights: Mapping[str, Tensor]) -> ShardedPolicy:
        """Another policy of the same shape and sharding with given weights and no gradients: a reference."""
        model = make_model(self.config)
        model.load_state_dict(dict(weights))
        model.requires_grad_(False)
        return ShardedPolicy(model.to(self.device), self.mesh)

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Forwards that no backward follows. All ranks enter and leave it.

        After such a forward FSDP holds the root's parameters whole, and `parameters()` would give these: an optimizer
        made then, or weights loaded then, would miss the sharded ones. So they are sharded again.
        """
        with torch.no_grad():
            yield
        if isinstance(self.module, FSDPModule):
            self.module.reshard()

    def wait_for_all(self, what: str, timeout_s: float) -> None:
        """Go on when all ranks are here.

        Raises TimeoutError, on rank 0, that names the ranks that did not come: a collective would wait for them in
        silence.
        """
        if self.mesh is None:
            return
        if self._lobby is None:
            # NCCL has no barrier that can say who is missing.
            self._lobby = dist.new_group(backend="gloo")
        try:
            dist.monitored_barrier(self._lobby, timedelta(seconds=timeout_s), wait_all_ranks=True)
        except RuntimeError as error:
            if self.rank:
                raise
            named = re.search(r"Ranks ([\d, ]+) failed", str(error))
            ranks = named[1] if named else "some"
            raise TimeoutError(f"{what}: rank {ranks} of the learner did not come within {timeout_s:g} s") from error

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """The sum of a small tensor over all ranks."""
        if self.mesh is None:
            return values
        total = values.to(self.device)
        dist.all_reduce(total, group=self.mesh.get_group())
        return total

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """The greatest of each value of a small tensor over all ranks."""
        if self.mesh is None:
            return values
        greatest = values.to(self.device)
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=self.mesh.get_group())
        return greatest


def gather_on_rank_0(rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on the CPU of rank 0. A collective; the other ranks hold one tensor at a time and keep none."""
    whole = {}
    for name, tensor in tensors.items():
        gathered = full_tensor(tensor)
        if rank == 0:
            whole[name] = gathered
    return whole


def full_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor, whole, copied to the CPU."""
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    return copy.deepcopy(whole.cpu()) if whole.device.type == "cpu" else whole.cpu()


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, sharded as `like` is."""
    whole = whole.to(like.device)
    if isinstance(like, DTensor):
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return whole
