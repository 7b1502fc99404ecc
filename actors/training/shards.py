"""Weight shards without LoRA: each rank's rows in the transfer format, and the manifest of all ranks.

Rows are transferred in the samplers' precision if that is narrower, and each rank computes the checksums of its own. A
version's digest is that of the weights as held, as in a checkpoint; the transferred rows have separate checksums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.weights.checksums import Checksum, checksum_of
from actors.weights.store import Manifest
from actors.weights.tensors import as_bytes, manifest_of_shards
from learner.model.networks import parameter_dtypes
from learner.parallel.sharded_tensors import on_cpu
from learner.parallel.sharding import ShardedPolicy

Checks = dict[str, tuple[int, int]]
"""Bytes and CRC-32 of a rank's rows, by tensor, as JSON has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferFormat:
    """Transfer format of weights without LoRA."""

    dtype: torch.dtype = torch.float32
    """The samplers' dtype, except for tensors that their network keeps in another. No tensor is widened."""
    stays_on_device: bool = False
    """Whether readers fetch them from the learner's device; otherwise they go through CPU memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """One rank's rows of all tensors."""

    rows: dict[str, Tensor]
    """In the transfer dtype: copies, which training does not change."""
    checks: tuple[Checks, Checks]
    """Checksums of these rows, and of the held rows whose dtype differs."""


class ShardExporter:
    """Converter of a policy's shards to the transfer format."""

    def __init__(self, policy: ShardedPolicy, transfer_format: TransferFormat) -> None:
        """Choose the transfer dtype of each tensor."""
        self._policy, self._shapes = policy, policy.shapes
        self._device = policy.device if transfer_format.stays_on_device else torch.device("cpu")
        self._held = policy.dtypes
        self._transfer_dtypes = {
            name: min(self._held[name], dtype, key=lambda one: one.itemsize)
            for name, dtype in parameter_dtypes(policy.config, transfer_format.dtype).items()
        }

    def local_shards(self) -> Shards:
        """Return this rank's shards."""
        held = self._policy.exported_shards()
        rows = {name: tensor.to(self._device, self._transfer_dtypes[name], copy=True) for name, tensor in held.items()}
        changed = ((name, tensor) for name, tensor in held.items() if tensor.dtype != self._transfer_dtypes[name])
        # Copied, because memory shared with numpy cannot be released when the learner is offloaded.
        as_held = ((name, on_cpu(tensor)) for name, tensor in changed)
        return Shards(rows=rows, checks=(_checks(rows.items()), _checks(as_held)))

    def manifest(self, version: int, ranks: Sequence[Sequence[Checks]]) -> Manifest:
        """Make the manifest from all ranks' `Shards.checks`, in their order."""
        transferred, changed = (_by_rank(kind) for kind in zip(*ranks, strict=True))
        if self._held == self._transfer_dtypes:
            return manifest_of_shards(version, self._shapes, self._transfer_dtypes, transferred)
        held = [own | as_held for own, as_held in zip(transferred, changed, strict=True)]
        digest = manifest_of_shards(version, self._shapes, self._held, held).digest
        return manifest_of_shards(version, self._shapes, self._transfer_dtypes, transferred, digest_override=digest)


def _checks(rows: Iterable[tuple[str, Tensor]]) -> Checks:
    found = ((name, checksum_of([as_bytes(tensor)])) for name, tensor in rows)
    return {name: (check.num_bytes, check.checksum) for name, check in found}


def _by_rank(ranks: Iterable[Mapping[str, Sequence[int]]]) -> list[dict[str, Checksum]]:
    return [
        {name: Checksum(num_bytes=num_bytes, checksum=checksum) for name, (num_bytes, checksum) in checks.items()}
        for checks in ranks
    ]
