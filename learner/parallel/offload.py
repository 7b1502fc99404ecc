"""Offloading of tensors to host memory, while another process uses the same GPU.

The tensor objects stay, so that the references of FSDP, optimizer and autograd remain valid: only their storages are
emptied, and refilled at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from learner.hardware import free_unused_memory, indexed_device
from learner.parallel.sharded_tensors import local_part


@contextmanager
@torch.no_grad()
def offloaded(tensors: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """Offload these tensors from `device` within the block, and restore them bit-identical after it.

    Tensors that share memory with them must be among them, or hold nothing that is needed. Those on other devices stay.
    """
    device = indexed_device(device)
    here = [local for tensor in tensors if (local := local_part(tensor.detach())).device == device and local.nbytes]
    storages = {storage.data_ptr(): storage for storage in (local.untyped_storage() for local in here)}
    sizes = [(storage, storage.nbytes()) for storage in storages.values()]
    on_host = [host_copy(local) for local in here]
    for storage, _ in sizes:
        storage.resize_(0)
    free_unused_memory(device)
    try:
        yield
    finally:
        for storage, num_bytes in sizes:
            storage.resize_(num_bytes)
        for local, copy in zip(here, on_host, strict=True):
            local.copy_(copy)


def host_copy(local: Tensor, *, non_blocking: bool = False) -> Tensor:
    """Copy a tensor to host memory, pinned if it is on a GPU: the bus then has its full speed.

    With `non_blocking` a copy from a GPU is complete after the current stream's next synchronization.
    """
    copy = torch.empty_like(local, device="cpu")
    return (copy if local.device.type == "cpu" else copy.pin_memory()).copy_(local, non_blocking=non_blocking)
