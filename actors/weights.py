"""Weights on their way from the learner to samplers and service: versioned, with a manifest, checked on arrival.

The store is an actor that owns the newest versions in Ray's object store, so that they outlive the learner that made
them; readers on one machine share the same memory. A reader compares every tensor with the manifest before it uses
any. (Whether a transfer was right is tested by comparing log-probabilities, never by its status.)
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors import NAMESPACE


class VersionMissingError(LookupError):
    """A weight store does not have a policy version (any more)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of a manifest."""

    name: str
    """The parameter's name in `learner.model.transformer`."""
    shape: tuple[int, ...]
    """Its shape."""
    dtype: str
    """Its torch dtype."""
    checksum: int
    """CRC-32 of its bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a policy version consists of."""

    version: int
    """The policy version."""
    tensors: tuple[TensorEntry, ...]
    """Every parameter."""

    @property
    def digest(self) -> str:
        """Names the weights themselves: a version that is made again after a rewind may be other weights.

        In whichever order: a learner with layers in 4 bits gives those last, and a checkpoint by name.
        """
        tensors = tuple(sorted(self.tensors, key=lambda entry: entry.name))
        return hashlib.sha256(repr(tensors).encode()).hexdigest()


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


class WeightStore:
    """Owns the newest policy versions."""

    def __init__(self, num_kept: int) -> None:
        """Keep `num_kept` versions; older ones are dropped when newer arrive."""
        self._num_kept = num_kept
        self._versions: dict[int, tuple[Manifest, ray.ObjectRef[Any]]] = {}

    def ready(self) -> int:
        """Answers while the actor lives, with its process id: another one is a restart."""
        return os.getpid()

    def keep(self, num_kept: int) -> None:
        """Keep `num_kept` versions from now on: a store that was taken over may have kept fewer."""
        self._num_kept = num_kept

    def publish(self, manifest: Manifest, weights: Mapping[str, NDArray[np.uint8]]) -> None:
        """Take over a version that was `put`. Put again, so that this actor owns it and not the learner that may die.

        Higher versions are of a future that a resumed run has given up: they go.
        """
        self._versions = {version: held for version, held in self._versions.items() if version < manifest.version}
        self._versions[manifest.version] = (manifest, ray.put(weights))
        for version in sorted(self._versions)[: -self._num_kept]:
            del self._versions[version]

    def get(self, version: int) -> tuple[Manifest, list[ray.ObjectRef[Any]]]:
        """A version's manifest and its weights. Raises VersionMissingError when it is not here (any more)."""
        if version not in self._versions:
            raise VersionMissingError(f"policy version {version} is not in the store; it has {sorted(self._versions)}")
        manifest, reference = self._versions[version]
        # In a list: a bare reference would be resolved on the way and copied through this actor.
        return manifest, [reference]

    def held(self) -> list[int]:
        """The versions that are here."""
        return sorted(self._versions)


def held_by(store: str, timeout_s: float) -> frozenset[int]:
    """The versions in the store with that Ray name; none where there is no such store, or it does not answer."""
    try:
        actor: Any = ray.get_actor(store, namespace=NAMESPACE)
        return frozenset(ray.get(actor.held.remote(), timeout=timeout_s))
    except (ValueError, ray.exceptions.RayError):
        return frozenset()


def store_name(run: str) -> str:
    """The Ray name of a run's weight store, in the namespace `d1`."""
    return f"d1-weights-{run}"


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
