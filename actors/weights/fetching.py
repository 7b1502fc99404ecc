"""Fetching policy versions: what a weight store has, verified, for samplers and the service.

The store owns them in Ray's object store, so that they outlive the learner that made them; readers on one machine share
the same memory. Under LoRA a version is its adapter, and what that stands on is fetched once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import ray
import torch
from torch import Tensor

from actors import NAMESPACE
from actors.messages import Generation
from actors.weights.store import Manifest, VersionMissingError
from actors.weights.tensors import Arrived, Rows, as_verified
from learner.model.lora import merge_into, merged_weights
from learner.model.transformer import Transformer


class Reader(Protocol):
    """What has versions and bases."""

    def version(self, version: int, digest: str | None = None) -> tuple[Manifest, Mapping[str, Tensor]]: ...
    def base(self, digest: str) -> Mapping[str, Tensor]: ...


class StoreReader:
    """Reads from a weight store."""

    def __init__(self, store: Any, timeout_s: float) -> None:
        """Take over the actor's handle; no answer may take longer than `timeout_s`, and tensors as much longer as their
        bytes take (`Manifest.travel_s`)."""
        self._store, self._timeout_s = store, timeout_s

    def version(self, version: int, digest: str | None = None) -> tuple[Manifest, Arrived]:
        """A policy version: its manifest, and its parameters or its adapter, for reading only.

        Args:
            version: the policy version.
            digest: the manifest's that it must have; None: whichever weights have the number now.

        Raises:
            VersionMissingError: the store does not have it.
            ValueError: it arrived damaged, or has another digest.
            TimeoutError: nothing came in time.
        """
        manifest, parts = self._fetched(f"policy version {version}", lambda: self._store.get.remote(version))
        if digest not in (None, manifest.digest):
            raise ValueError(
                f"the weight store has other weights under policy version {version} than were announced: "
                f"their checksum is {manifest.digest[:12]}, and that was {digest[:12]}"
            )
        return manifest, as_verified(manifest, parts)

    def base(self, digest: str) -> Arrived:
        """What adapters stand on, for reading only. Raises as `version`."""
        what = f"base {digest[:12]}"
        manifest, parts = self._fetched(what, lambda: self._store.base.remote(digest))
        return as_verified(manifest, parts, what)

    def _fetched(self, what: str, ask: Callable[[], Any]) -> tuple[Manifest, list[Rows]]:
        within_s = self._timeout_s
        try:
            manifest, references = ray.get(ask(), timeout=within_s)
            within_s = manifest.travel_s(self._timeout_s)
            return manifest, ray.get(references, timeout=within_s)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"{what} did not arrive within {within_s:.0f} s") from error
        except ray.exceptions.RayTaskError as error:
            # As the store raised it: wrapped, and wrapped again by whoever asked us, nobody could tell what it was.
            raise error.cause from None
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            # Gone before it answered, or after: what it owned went with it.
            raise VersionMissingError(
                f"the weight store is gone, or who held its weights, and {what} with it"
            ) from error


def fetch(store: str, version: int, timeout_s: float, digest: str | None = None) -> dict[str, Tensor]:
    """Every parameter of a version from the store with that Ray name, for reading only.

    Raises as `StoreReader.version`; VersionMissingError too when there is no such store.
    """
    try:
        actor = ray.get_actor(store, namespace=NAMESPACE)
    except ValueError as error:
        raise VersionMissingError(f"there is no weight store {store} on this cluster") from error
    return whole_version(StoreReader(actor, timeout_s), version, digest)


def whole_version(reader: Reader, version: int, digest: str | None = None) -> dict[str, Tensor]:
    """Every parameter of a version, an adapter merged, for reading only. Raises as `StoreReader.version`."""
    manifest, weights = reader.version(version, digest)
    if manifest.base is None:
        return dict(weights)
    return merged_weights(reader.base(manifest.base.digest), weights, manifest.base.scaling)


class BaseAtHand:
    """A reader that holds on to the base that it read last. A sampler that sleeps loads it again and again: from the
    object store of its machine, not fetched and verified anew."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._held: tuple[str, Mapping[str, Tensor]] | None = None

    def version(self, version: int, digest: str | None = None) -> tuple[Manifest, Mapping[str, Tensor]]:
        """As the reader's."""
        return self._reader.version(version, digest)

    def base(self, digest: str) -> Mapping[str, Tensor]:
        """As the reader's."""
        if self._held is None or self._held[0] != digest:
            self._held = None  # The store cannot give up what is read.
            self._held = digest, self._reader.base(digest)
        return self._held[1]


class StagingReader:
    """A reader that fetches and verifies a version on another thread, before it is asked for.

    What is left to do then is to copy it.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._staged: tuple[Generation, Future[tuple[Manifest, Mapping[str, Tensor]]]] | None = None

    def stage(self, generation: Generation) -> None:
        """Fetch it, unless that is done or under way. What was staged before and not asked for is let go."""
        if (staged := self._staged) is not None and staged[0] == generation:
            return
        fetched: Future[tuple[Manifest, Mapping[str, Tensor]]] = Future()
        self._staged = generation, fetched
        try:
            fetched.set_result(self._reader.version(generation.version, generation.digest))
        except Exception as error:
            # Who asks for it fetches it again, and says what is wrong.
            fetched.set_exception(error)

    def version(self, version: int, digest: str | None = None) -> tuple[Manifest, Mapping[str, Tensor]]:
        """As the reader's; what is staged is handed over, and held no longer."""
        staged = self._staged
        if staged is not None and (staged[0].version, staged[0].digest) == (version, digest):
            self._staged = None
            if staged[1].exception() is None:
                return staged[1].result()
        return self._reader.version(version, digest)

    def base(self, digest: str) -> Mapping[str, Tensor]:
        """As the reader's."""
        return self._reader.base(digest)


class PolicyLoader:
    """Loads versions into one policy, in place. Under LoRA their base stays beside it, on the policy's device."""

    def __init__(self, policy: Transformer, reader: Reader) -> None:
        """`policy` holds anything yet."""
        self._policy, self._reader = policy, reader
        self._base: tuple[str, dict[str, Tensor]] | None = None

    def load(self, generation: Generation) -> None:
        """Make the policy those weights. Raises as `StoreReader.version`; the policy may then be of no version."""
        manifest, weights = self._reader.version(generation.version, generation.digest)
        if manifest.base is None:
            self._base = None
            load_in_place(self._policy, weights)
            return
        if self._base is not None and self._base[0] == manifest.base.digest:
            merge_into(self._policy, self._base[1], weights, manifest.base.scaling, only_adapted=True)
            return
        self._base = None  # Two of them may be more than there is memory for.
        device = next(self._policy.parameters()).device
        base = {name: tensor.to(device) for name, tensor in self._reader.base(manifest.base.digest).items()}
        merge_into(self._policy, base, weights, manifest.base.scaling, only_adapted=False)
        # Not before: where that fails, what has no adapter is not in the policy yet.
        self._base = manifest.base.digest, base

    def let_go(self) -> None:
        """Forget the base: the policy's weights are to be anything again."""
        self._base = None


@torch.no_grad()
def load_in_place(policy: Transformer, weights: Mapping[str, Tensor]) -> None:
    """Make `weights` the policy's, in its precision: what came in pieces is copied piece by piece, and never whole.

    Raises ValueError where they are not the parameters of such a policy.
    """
    held = policy.state_dict()
    if differing := held.keys() ^ weights.keys():
        raise ValueError(f"these are not the weights of this policy, which differs in {min(differing)}")
    for name, whole in held.items():
        pieces = weights.pieces(name) if isinstance(weights, Arrived) else (weights[name],)
        if sum(map(len, pieces)) != len(whole) or any(piece.shape[1:] != whole.shape[1:] for piece in pieces):
            raise ValueError(f"these are not the weights of this policy: {name} has another shape")
        for rows, piece in zip(whole.split([len(piece) for piece in pieces]), pieces, strict=True):
            rows.copy_(piece)
