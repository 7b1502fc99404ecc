"""Weights on their way from the learner to samplers and service: versioned, with a manifest, checked on arrival.

The store is an actor that owns the newest versions in Ray's object store, so that they outlive the learner that made
them; readers on one machine share the same memory. A reader compares every tensor with the manifest before it uses
any. (Whether a transfer was right is tested by comparing log-probabilities, never by its status.)
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

from actors import NAMESPACE
from actors.weight_store import Manifest, TensorEntry, VersionMissingError


def make_manifest(version: int, weights: Mapping[str, Tensor]) -> Manifest:
    """The manifest of whole CPU tensors."""
    entries = tuple(
        TensorEntry(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype), checksum=_checksum(tensor))
        for name, tensor in weights.items()
    )
    return Manifest(version=version, tensors=entries)


def verify(manifest: Manifest, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError, naming the first tensor that is not what the manifest lists."""
    actual = {entry.name: entry for entry in make_manifest(manifest.version, weights).tensors}
    for entry in manifest.tensors:
        if actual.pop(entry.name, None) != entry:
            raise ValueError(f"policy version {manifest.version} arrived damaged: tensor {entry.name} differs")
    if actual:
        raise ValueError(f"policy version {manifest.version} arrived with an unlisted tensor {min(actual)}")


def put(weights: Mapping[str, Tensor]) -> ray.ObjectRef[Any]:
    """Whole CPU tensors in Ray's object store, as `WeightStore.publish` takes them over.

    As bytes, which every process on a machine reads from the same memory. (Ray does that with tensors too where it is
    told to, and then imports torch in each process of the cluster: two seconds of CPU each.)
    """
    return ray.put({name: _bytes(tensor) for name, tensor in weights.items()})


def fetch_from(store: Any, version: int, timeout_s: float, digest: str | None = None) -> dict[str, Tensor]:
    """A verified policy version from a store actor.

    Args:
        store: the actor.
        version: the policy version.
        timeout_s: how long it may take.
        digest: the manifest's that it must have; None: whichever weights have the number now.

    Raises:
        VersionMissingError: the store does not have it.
        ValueError: it arrived damaged, or has another digest.
        TimeoutError: nothing came within `timeout_s`.
    """
    try:
        manifest, (reference,) = ray.get(store.get.remote(version), timeout=timeout_s)
        arrays = ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(f"policy version {version} did not arrive within {timeout_s:.0f} s") from error
    except ray.exceptions.RayTaskError as error:
        # As the store raised it: wrapped, and wrapped again by whoever asked us, nobody could tell what it was.
        raise error.cause from None
    except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
        # Gone before it answered, or after: what it owned went with it.
        raise VersionMissingError(f"the weight store is gone, and policy version {version} with it") from error
    if digest not in (None, manifest.digest):
        raise ValueError(
            f"the weight store has other weights under policy version {version} than were announced: "
            f"their checksum is {manifest.digest[:12]}, and that was {digest[:12]}"
        )
    return _verified(manifest, arrays)


def fetch(store: str, version: int, timeout_s: float, digest: str | None = None) -> dict[str, Tensor]:
    """As `fetch_from`, of the store with that Ray name. Raises VersionMissingError too when there is no such store."""
    try:
        actor = ray.get_actor(store, namespace=NAMESPACE)
    except ValueError as error:
        raise VersionMissingError(f"there is no weight store {store} on this cluster") from error
    return fetch_from(actor, version, timeout_s, digest)


def _verified(manifest: Manifest, arrays: Mapping[str, NDArray[np.uint8]]) -> dict[str, Tensor]:
    """The tensors that a manifest lists, in the memory of `arrays`: for reading only. Raises as `verify`."""
    with warnings.catch_warnings():
        # Nobody writes to what `fetch` gives.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        weights = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for entry in manifest.tensors:
        dtype: torch.dtype = getattr(torch, entry.dtype.removeprefix("torch."))
        if entry.name in weights and weights[entry.name].numel() == dtype.itemsize * math.prod(entry.shape):
            weights[entry.name] = weights[entry.name].view(dtype).view(entry.shape)
    verify(manifest, weights)
    return weights


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(_bytes(tensor).data)
