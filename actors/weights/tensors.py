"""Serialization of weights: tensors as bytes with a manifest, verified on arrival.

A reader compares every tensor with the manifest before it uses any. (Whether a transfer was right is tested by
comparing log-probabilities, never by its status.)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.weights.checksums import Checksum, checksum_of, combine_checksums
from actors.weights.store import Manifest, TensorEntry
from learner.model.checkpoint_files import BaseCheckpoint
from learner.model.storage.throughput import ReportProgress, Throughput, num_threads
from learner.model.storage.weights import StoredWeights

# Elements of a tensor that are converted and checksummed at a time.
_LOOKED_AT = 1 << 20
TensorRows = Mapping[str, NDArray[np.uint8] | Tensor]
"""One rank's rows of each tensor, or all rows: as bytes, or as tensors in its memory, on CPU or GPU."""


def make_manifest(
    version: int, weights: Mapping[str, Tensor], base: BaseCheckpoint | None = None, digest_override: str | None = None
) -> Manifest:
    """Make the manifest of whole CPU tensors: every parameter, or those of an adapter on `base`."""
    entries = tuple(
        _entry(name, tensor.shape, tensor.dtype, checksum_of([as_bytes(tensor)])) for name, tensor in weights.items()
    )
    return Manifest(version=version, tensors=entries, base=base, digest_override=digest_override)


def manifest_of_shards(
    version: int,
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, torch.dtype],
    ranks: Sequence[Mapping[str, Checksum]],
    digest_override: str | None = None,
) -> Manifest:
    """Make the manifest of tensors whose rows are on several ranks, from the ranks' checksums in their order."""
    entries = (
        _entry(name, shape, dtypes[name], combine_checksums(found[name] for found in ranks if name in found))
        for name, shape in shapes.items()
    )
    return Manifest(version=version, tensors=tuple(entries), digest_override=digest_override)


def float32_digest(weights: Mapping[str, Tensor] | StoredWeights, report: ReportProgress | None = None) -> str:
    """Compute the digest of whole weights as a learner, which computes in float32, publishes them.

    They are converted and checksummed a piece at a time. `report` receives the throughput.
    """
    shapes = {name: tuple(weights[name].shape) for name in weights}
    num_bytes = torch.float32.itemsize * sum(map(math.prod, shapes.values()))
    progress = Throughput("computing the checksum of version 0", num_bytes, report)

    def check(name: str) -> Checksum:
        shape, tensor = shapes[name], weights[name]
        step = max(1, _LOOKED_AT // math.prod(shape[1:]))
        found = []
        for begin in range(0, shape[0], step):
            rows = as_bytes(tensor[begin : begin + step].float())
            found.append(checksum_of([rows]))
            progress.add(rows.nbytes)
        return combine_checksums(found)

    with ThreadPoolExecutor(num_threads()) as threads:
        found = dict(zip(shapes, threads.map(check, shapes), strict=True))
    return manifest_of_shards(0, shapes, dict.fromkeys(shapes, torch.float32), [found]).digest


def verify(manifest: Manifest, weights: Mapping[str, Tensor], what: str = "") -> None:
    """Raise ValueError, naming the first tensor that differs from the manifest; `what` names the weights, if not a
    version."""
    as_verified(manifest, [weights], what)


def put(weights: Mapping[str, Tensor]) -> ray.ObjectRef[Any]:
    """Put whole CPU tensors into Ray's object store, for `WeightStore.publish`.

    They are stored as bytes, which every process on a machine reads from the same memory. (Ray can do that with tensors
    too, but then imports torch in each process of the cluster: two seconds of CPU each.)
    """
    return ray.put({name: as_bytes(tensor) for name, tensor in weights.items()})


class ReceivedTensors(Mapping[str, Tensor]):
    """Read-only tensors of a version by name, in the memory that they arrived in.

    A tensor whose rows came from several ranks is concatenated on access, and not kept: `pieces` returns its parts.
    """

    def __init__(self, pieces: Mapping[str, Sequence[Tensor]]) -> None:
        """Take each tensor as consecutive pieces of some rows."""
        self._pieces = pieces

    def __getitem__(self, name: str) -> Tensor:
        pieces = self._pieces[name]
        return pieces[0] if len(pieces) == 1 else torch.cat(tuple(pieces))

    def __contains__(self, name: object) -> bool:
        """Look up a name without concatenating its tensor, as `Mapping`'s would."""
        return name in self._pieces

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def pieces(self, name: str) -> Sequence[Tensor]:
        """Return a tensor's rows in the pieces that arrived."""
        return self._pieces[name]


def as_verified(manifest: Manifest, parts: Sequence[TensorRows], what: str = "") -> ReceivedTensors:
    """Return the tensors that a manifest lists, whose rows are consecutive in `parts`. Raises as `verify`."""
    what = what or f"policy version {manifest.version}"
    received = ReceivedTensors({entry.name: _pieces(entry, parts, what) for entry in manifest.tensors})
    if unlisted := [name for part in parts for name in part if name not in received]:
        raise ValueError(f"{what} arrived with an unlisted tensor {min(unlisted)}")
    return received


def as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the memory of a tensor if it is contiguous on the CPU; else a copy."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def _pieces(entry: TensorEntry, parts: Sequence[TensorRows], what: str) -> list[Tensor]:
    held = [part[entry.name] for part in parts if entry.name in part]
    dtype: torch.dtype = getattr(torch, entry.dtype.removeprefix("torch."))
    # Bytes have neither dtype nor shape; a tensor with the right bytes may still have the wrong ones.
    are_alike = all(one.dtype == dtype and one.shape[1:] == entry.shape[1:] for one in held if isinstance(one, Tensor))
    found = checksum_of(as_bytes(rows) if isinstance(rows, Tensor) else rows for rows in held)
    if not held or not are_alike or found != Checksum(num_bytes=entry.num_bytes, checksum=entry.checksum):
        raise ValueError(f"{what} arrived damaged: tensor {entry.name} differs")
    if len(held) == 1:
        return [_tensor(held[0], dtype).view(entry.shape)]
    return [_tensor(rows, dtype).view(-1, *entry.shape[1:]) for rows in held if rows.nbytes]


def _tensor(rows: NDArray[np.uint8] | Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(rows, Tensor):
        return rows
    with warnings.catch_warnings():
        # Fetched weights are never written to.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(rows).view(dtype)


def _entry(name: str, shape: Sequence[int], dtype: torch.dtype, found: Checksum) -> TensorEntry:
    return TensorEntry(name=name, shape=tuple(shape), dtype=str(dtype), checksum=found.checksum)
