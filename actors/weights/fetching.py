"""Weight sync, receiving side: fetch, verify and load policy versions, in samplers and the service.

The store owns them in Ray's object store, so that they outlive the learner that made them. Readers on one machine share
the same memory. Under LoRA a version is an adapter, and its base checkpoint is read once, from the run directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import ray
import torch
from torch import Tensor

from actors import NAMESPACE
from actors.messages import WeightsId
from actors.weights.store import Manifest, VersionMissingError
from actors.weights.tensors import ReceivedTensors, TensorRows, as_verified
from learner.model.adapter import attach_adapters, read_chain
from learner.model.checkpoint import round_weights
from learner.model.checkpoint_files import BaseCheckpoint, chain_digest, checkpoint_chain, verify_own_files
from learner.model.lora import is_adapter, plain_name, set_adapter
from learner.model.lora_config import BaseWeights
from learner.model.storage.weights import StoredWeights
from learner.model.transformer import Transformer

_VISIBLE_WITHIN_S, _POLL_S = 60.0, 0.5
_PIECES_AT_A_TIME = 2


class Reader(Protocol):
    """A source of policy versions."""

    def version(self, version: int, digest: str | None = None) -> tuple[Manifest, Mapping[str, Tensor]]: ...


class StoreReader:
    """Reader of a weight store."""

    def __init__(self, store: Any, timeout_s: float) -> None:
        """Take the actor's handle. `timeout_s` is the timeout of an answer; for tensors their size extends it
        (`Manifest.transfer_timeout_s`)."""
        self._store, self._timeout_s = store, timeout_s

    def version(self, version: int, digest: str | None = None) -> tuple[Manifest, ReceivedTensors]:
        """Return a policy version: its manifest, and its parameters or its adapter, read-only.

        Args:
            version: the policy version.
            digest: the manifest digest that it must have; None: any.

        Raises:
            VersionMissingError: the store does not have it.
            ValueError: it arrived damaged, or has another digest.
            TimeoutError: it did not arrive in time.
        """
        manifest, parts = self._fetched(f"policy version {version}", lambda: self._store.get.remote(version))
        if digest not in (None, manifest.digest):
            raise ValueError(
                f"the weight store has other weights under policy version {version} than were announced: "
                f"their checksum is {manifest.digest[:12]}, and that was {digest[:12]}"
            )
        return manifest, as_verified(manifest, parts)

    def _fetched(self, what: str, ask: Callable[[], Any]) -> tuple[Manifest, list[TensorRows]]:
        within_s = self._timeout_s
        try:
            manifest, references = ray.get(ask(), timeout=within_s)
            within_s = manifest.transfer_timeout_s(self._timeout_s)
            return manifest, _pieces(references, time.monotonic() + within_s)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"{what} did not arrive within {within_s:.0f} s") from error
        except ray.exceptions.RayTaskError as error:
            # Raise the store's own exception: callers could not recognize it inside of Ray's wrapper.
            raise error.cause from None
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            # The store died before it answered, or after, and the objects that it owned with it.
            raise VersionMissingError(
                f"the weight store or the owner of its weights is gone, and {what} with it"
            ) from error


def _pieces(references: Sequence[Any], deadline: float) -> list[TensorRows]:
    """Fetch the pieces of a version, a few at a time, in an order of this machine's own.

    Ray sends an object on from every machine that has all of it. If all machines asked for the same pieces at once, the
    machine of the store or the rank would send each of them to everyone.
    """
    node = ray.get_runtime_context().get_node_id()
    order = sorted(range(len(references)), key=lambda index: crc32(f"{node} {index}".encode()))
    found: dict[int, TensorRows] = {}
    for start in range(0, len(order), _PIECES_AT_A_TIME):
        indices = order[start : start + _PIECES_AT_A_TIME]
        within_s = max(0.0, deadline - time.monotonic())
        fetched = ray.get([references[index] for index in indices], timeout=within_s)
        found |= zip(indices, fetched, strict=True)
    return [found[index] for index in range(len(references))]


def open_store(store: str, timeout_s: float) -> StoreReader:
    """Open a reader of the weight store with that Ray name. Raises VersionMissingError if there is none."""
    try:
        actor = ray.get_actor(store, namespace=NAMESPACE)
    except ValueError as error:
        raise VersionMissingError(f"there is no weight store {store} on this cluster") from error
    return StoreReader(actor, timeout_s)


class PrefetchingReader:
    """Reader that prefetches and verifies a version on another thread, so that loading only has to copy it."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._prefetched: tuple[WeightsId, Future[tuple[Manifest, Mapping[str, Tensor]]]] | None = None

    def prefetch(self, weights_id: WeightsId) -> None:
        """Prefetch a version, unless that is done or in progress. An earlier prefetch that was not used is dropped."""
        if (prefetched := self._prefetched) is not None and prefetched[0] == weights_id:
            return
        fetched: Future[tuple[Manifest, Mapping[str, Tensor]]] = Future()
        self._prefetched = weights_id, fetched
        try:
            fetched.set_result(self._reader.version(weights_id.version, weights_id.digest))
        except Exception as error:
            # `version` fetches it again, and raises the error.
            fetched.set_exception(error)

    def version(self, version: int, digest: str | None = None) -> tuple[Manifest, Mapping[str, Tensor]]:
        """Return a version as `Reader.version` does; a prefetched one is handed over and no longer held."""
        prefetched = self._prefetched
        if prefetched is not None and (prefetched[0].version, prefetched[0].digest) == (version, digest):
            self._prefetched = None
            if prefetched[1].exception() is None:
                return prefetched[1].result()
        return self._reader.version(version, digest)


class PolicyLoader:
    """In-place loader of policy versions: all weights, or an adapter on top of its base checkpoint's weights."""

    def __init__(self, policy: Transformer, reader: Reader, checkpoints_dir: Path) -> None:
        """Create a loader for `policy`, which may be uninitialized; `checkpoints_dir` has the base checkpoints of
        adapters."""
        self._policy, self._reader, self._checkpoints_dir = policy, reader, checkpoints_dir
        self._base: BaseCheckpoint | None = None
        self._weights: tuple[str, BaseWeights] | None = None
        self._verified: set[str] = set()

    def load(self, weights_id: WeightsId) -> None:
        """Load a version into the policy.

        Raises as `StoreReader.version` does, and ValueError if the base checkpoint of an adapter is damaged or is not
        the one that the adapter was trained on. The policy may then be a mixture of versions.
        """
        manifest, weights = self._reader.version(weights_id.version, weights_id.digest)
        base = manifest.base
        if base is None:
            self.forget_base()
            load_in_place(self._policy, weights)
        elif base == self._base:
            set_adapter(self._policy, weights, base.scaling)
        else:
            # If any of this fails, the next load starts from the beginning.
            self._base = None
            _wait_for(self._checkpoints_dir / base.checkpoint)
            directory = base.directory(self._checkpoints_dir)
            self._verify(directory)
            chain = read_chain(directory)
            self._load_weights(chain.weights, base.base_weights)
            attach_adapters(self._policy, weights, base.scaling, chain.combined)
            self._base = base

    def forget_base(self) -> None:
        """Forget which base is loaded: the policy's memory is about to be released or overwritten."""
        self._base = self._weights = None

    def _verify(self, directory: Path) -> None:
        """Verify a checkpoint and its base checkpoints, each once: hashing a large policy takes seconds."""
        for checkpoint in checkpoint_chain(directory):
            if (digest := chain_digest(checkpoint)) not in self._verified:
                verify_own_files(checkpoint)
                self._verified.add(digest)

    def _load_weights(self, directory: Path, base_weights: BaseWeights) -> None:
        """Load the weights of a checkpoint, unless the policy already has them."""
        wanted = chain_digest(directory), base_weights
        if self._weights == wanted:
            return
        self._weights = None
        StoredWeights(directory).read_into(_weights_of(self._policy))
        if base_weights == "nf4":
            round_weights(self._policy, directory)
        self._weights = wanted


def _wait_for(directory: Path) -> None:
    """Wait until a new checkpoint is visible: a network file system may take seconds to show it to other machines."""
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while not directory.is_dir() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


@torch.no_grad()
def load_in_place(policy: Transformer, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into the policy, in its precision; tensors in pieces are copied piece by piece, never assembled.

    Raises ValueError if they are not the parameters of such a policy.
    """
    held = _weights_of(policy)
    if differing := held.keys() ^ weights.keys():
        raise ValueError(f"these are not the weights of this policy, which differs in {min(differing)}")
    for name, whole in held.items():
        pieces = weights.pieces(name) if isinstance(weights, ReceivedTensors) else (weights[name],)
        if sum(map(len, pieces)) != len(whole) or any(piece.shape[1:] != whole.shape[1:] for piece in pieces):
            raise ValueError(f"these are not the weights of this policy: {name} has another shape")
        for rows, piece in zip(whole.split([len(piece) for piece in pieces]), pieces, strict=True):
            rows.copy_(piece)


def _weights_of(policy: Transformer) -> dict[str, Tensor]:
    """Return the parameters of a policy by plain name, without adapters."""
    named = ((plain_name(name), parameter.detach()) for name, parameter in policy.named_parameters())
    return {name: parameter for name, parameter in named if not is_adapter(name)}
