"""Tensors that FSDP shards by rows: gathering them, and this rank's part of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from learner.parallel.progress import PROGRESS

# The name from torch 2.13 on, or else the old one, which is deprecated in torch 2.14.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Sharded by rows over the ranks of the only copy; or of each copy, if there are several.
_BY_ROWS = ((Shard(0),), (Replicate(), Shard(0)))


class Rows(Protocol):
    """A whole tensor, in memory or in a file, that can be sliced by rows."""

    def __getitem__(self, rows: slice, /) -> Tensor: ...


def gather_on_rank_0(rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather whole tensors on rank 0's CPU. A collective; the other ranks hold one tensor at a time and keep none."""
    whole = {}
    for name, tensor in tensors.items():
        full = gathered(tensor)
        if rank == 0:
            whole[name] = on_cpu(full)
    return whole


def gathered(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor, whole, on the device of its shards."""
    whole = tensor.detach()
    return _all_gathered(whole) if isinstance(whole, DTensor) else whole


def _all_gathered(sharded: DTensor) -> Tensor:
    """Gather what `full_tensor` returns by another collective, because on gloo that one corrupts the heap.

    The two threads of a gloo group store the name of their last collective in one `std::string`, without a lock
    (`lastCompletedWorkName`, torch 2.13). The name of `full_tensor`'s, ALLGATHER_COALESCED, is too long for the
    string's inline buffer. Each thread frees the name that it replaces: if both replace the same one, as happens on a
    busy machine, it is freed twice. The name of this one, ALLGATHER, fits, and nothing is freed.
    """
    assert sharded.placements in _BY_ROWS, "FSDP shards by rows"
    num_rows, *row = sharded.shape
    # The ranks of this copy of the policy; there may be other copies.
    sharing = sharded.device_mesh.get_group(sharded.device_mesh.ndim - 1)
    rows_each = -(-num_rows // sharing.size())
    local = sharded.to_local()
    # The last ranks may have fewer rows, or none.
    padded = torch.cat((local, local.new_zeros(rows_each - local.shape[0], *row)))
    whole = local.new_empty(rows_each * sharing.size(), *row)
    with PROGRESS.in_collective("an all-gather"):
        _all_gather(whole, padded, group=sharing)
    return whole[:num_rows]


def on_cpu(whole: Tensor) -> Tensor:
    """Copy a tensor to the CPU."""
    return whole.to("cpu", copy=True)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; all of one that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_rows(tensor: Tensor) -> slice:
    """Return the rows of a tensor that this rank holds; all of one that is not sharded."""
    if not isinstance(tensor, DTensor):
        return slice(None)
    assert tensor.placements in _BY_ROWS, "FSDP shards by rows"
    num_rows, mesh = tensor.shape[0], tensor.device_mesh
    along = mesh.ndim - 1
    rows_each = -(-num_rows // mesh.size(along))
    begin = min(mesh.get_local_rank(along) * rows_each, num_rows)
    return slice(begin, min(begin + rows_each, num_rows))


def shard_like(whole: Rows, like: Tensor) -> Tensor:
    """Copy this rank's part of a whole tensor, with the sharding and device of `like`."""
    mine = whole[own_rows(like)].to(like.device, copy=True)
    if isinstance(like, DTensor):
        return DTensor.from_local(
            mine, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    return mine
