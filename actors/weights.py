"""Weights as they travel from the learner to samplers and service: bytes with a manifest, checked on arrival.

A reader compares every tensor with the manifest before it uses any. (Whether a transfer was right is tested by
comparing log-probabilities, never by its status.)
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.weight_store import Base, Manifest, TensorEntry


def make_manifest(
    version: int, weights: Mapping[str, Tensor], base: Base | None = None, known_as: str | None = None
) -> Manifest:
    """The manifest of whole CPU tensors: every parameter, or the adapter's that stand on `base`."""
    entries = tuple(
        TensorEntry(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype), checksum=_checksum(tensor))
        for name, tensor in weights.items()
    )
    return Manifest(version=version, tensors=entries, base=base, known_as=known_as)


def verify(manifest: Manifest, weights: Mapping[str, Tensor], what: str = "") -> None:
    """Raise ValueError, naming the first tensor that is not what the manifest lists; `what` they are, if no version."""
    what = what or f"policy version {manifest.version}"
    actual = {entry.name: entry for entry in make_manifest(manifest.version, weights).tensors}
    for entry in manifest.tensors:
        if actual.pop(entry.name, None) != entry:
            raise ValueError(f"{what} arrived damaged: tensor {entry.name} differs")
    if actual:
        raise ValueError(f"{what} arrived with an unlisted tensor {min(actual)}")


def put(weights: Mapping[str, Tensor]) -> ray.ObjectRef[Any]:
    """Whole CPU tensors in Ray's object store, as `WeightStore.publish` takes them over.

    As bytes, which every process on a machine reads from the same memory. (Ray does that with tensors too where it is
    told to, and then imports torch in each process of the cluster: two seconds of CPU each.)
    """
    return ray.put({name: _bytes(tensor) for name, tensor in weights.items()})


def as_verified(manifest: Manifest, arrays: Mapping[str, NDArray[np.uint8]], what: str = "") -> dict[str, Tensor]:
    """The tensors that a manifest lists, in the memory of `arrays`: for reading only. Raises as `verify`."""
    with warnings.catch_warnings():
        # Nobody writes to what is fetched.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        weights = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for entry in manifest.tensors:
        dtype: torch.dtype = getattr(torch, entry.dtype.removeprefix("torch."))
        if entry.name in weights and weights[entry.name].numel() == dtype.itemsize * math.prod(entry.shape):
            weights[entry.name] = weights[entry.name].view(dtype).view(entry.shape)
    verify(manifest, weights, what)
    return weights


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(_bytes(tensor).data)
