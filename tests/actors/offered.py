"""Weights offered by a learner's ranks, collected without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from actors.weights.store import Manifest
from actors.weights.tensors import ReceivedTensors, TensorRows, as_bytes, as_verified


class Offers:
    """Gathers the offered shards on rank 0 at once, so that `offer` is a collective."""

    def __init__(self) -> None:
        self._key = ""
        self._parts: Sequence[TensorRows | None] = ()

    def offer(self, key: str, shards: Mapping[str, Tensor]) -> None:
        rows = {name: as_bytes(tensor).copy() for name, tensor in shards.items()}
        self._key, self._parts = key, [rows]
        if dist.is_initialized():
            is_first = dist.get_rank() == 0
            self._parts = [None] * dist.get_world_size() if is_first else ()
            dist.gather_object(rows, self._parts if is_first else None)

    def taken(self, manifest: Manifest, key: str, num_ranks: int) -> ReceivedTensors:
        assert (key, num_ranks) == (self._key, len(self._parts))
        return as_verified(manifest, [part for part in self._parts if part is not None])
