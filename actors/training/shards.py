"""Shards: what one rank hands over of a policy whose weights are all trained, and the manifest of all ranks' together.

Rows travel in the samplers' precision where that is the narrower one, and each rank looks at its own. A version's
digest is of the weights as they are held, as in a checkpoint: what travels has checksums of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.weights.checksums import Checked, checked
from actors.weights.store import Manifest
from actors.weights.tensors import as_bytes, manifest_of_shards
from learner.model.networks import held_dtypes
from learner.parallel.sharding import ShardedPolicy, on_cpu

Checks = dict[str, tuple[int, int]]
"""Of each tensor the bytes of a rank's rows, and their CRC-32: as JSON has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Travel:
    """How weights travel that are all trained."""

    dtype: torch.dtype = torch.float32
    """What the samplers hold a policy in, but for what their network keeps as it is. Nothing goes in a wider one."""
    stays_on_device: bool = False
    """Whether readers fetch them from where the learner computes; else they go by way of the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """One rank's rows."""

    rows: dict[str, Tensor]
    """As they travel: copies, which nobody trains on."""
    checks: tuple[Checks, Checks]
    """Of them, and of those rows as they are held that travel otherwise."""


class Shipping:
    """What travels of a policy, as what."""

    def __init__(self, policy: ShardedPolicy, travel: Travel) -> None:
        """What travels of it as `travel` says."""
        self._policy, self._shapes = policy, policy.shapes
        self._device = policy.device if travel.stays_on_device else torch.device("cpu")
        self._held = policy.dtypes
        self._travels = {
            name: min(self._held[name], dtype, key=lambda one: one.itemsize)
            for name, dtype in held_dtypes(policy.config, travel.dtype).items()
        }

    def own(self) -> Shards:
        """This rank's part of it."""
        held = self._policy.own_shards()
        rows = {name: tensor.to(self._device, self._travels[name], copy=True) for name, tensor in held.items()}
        changed = ((name, tensor) for name, tensor in held.items() if tensor.dtype != self._travels[name])
        # Through a copy: memory that numpy has seen cannot be given back, as a learner that sleeps does.
        as_held = ((name, on_cpu(tensor)) for name, tensor in changed)
        return Shards(rows=rows, checks=(_checks(rows.items()), _checks(as_held)))

    def manifest(self, version: int, ranks: Sequence[Sequence[Checks]]) -> Manifest:
        """Of what all ranks have, in their order: their `Shards.checks`."""
        travels, changed = (_by_rank(kind) for kind in zip(*ranks, strict=True))
        if self._held == self._travels:
            return manifest_of_shards(version, self._shapes, self._travels, travels)
        held = [own | as_held for own, as_held in zip(travels, changed, strict=True)]
        digest = manifest_of_shards(version, self._shapes, self._held, held).digest
        return manifest_of_shards(version, self._shapes, self._travels, travels, known_as=digest)


def _checks(rows: Iterable[tuple[str, Tensor]]) -> Checks:
    found = ((name, checked([as_bytes(tensor)])) for name, tensor in rows)
    return {name: (check.num_bytes, check.checksum) for name, check in found}


def _by_rank(ranks: Iterable[Mapping[str, Sequence[int]]]) -> list[dict[str, Checked]]:
    return [
        {name: Checked(num_bytes=num_bytes, checksum=checksum) for name, (num_bytes, checksum) in checks.items()}
        for checks in ranks
    ]
