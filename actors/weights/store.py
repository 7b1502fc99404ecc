"""Weight store: an actor that owns the newest policy versions in Ray's object store.

So they outlive the learner that made them. The store holds bytes and needs no torch: `actors.weights.tensors` converts
between bytes and tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from actors.weights.offering import in_pieces, offered_rows
from learner.model.checkpoint_files import BaseCheckpoint
from learner.parallel.timeouts import transfer_timeout_s


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

    @property
    def num_bytes(self) -> int:
        """Its size, from the bits in the name of its dtype: the first number of `torch.float8_e4m3fn`."""
        bits = re.search(r"\d+", self.dtype)
        assert bits is not None, f"{self.name} has dtype {self.dtype}"
        return math.prod(self.shape) * int(bits[0]) // 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Manifest of a policy version: its tensors and their checksums."""

    version: int
    """The policy version."""
    tensors: tuple[TensorEntry, ...]
    """Every parameter; with a base, the matrices of the adapter."""
    base: BaseCheckpoint | None = None
    """Under LoRA, the adapter's base checkpoint, which is not transferred."""
    digest_override: str | None = None
    """Digest of these weights in another form, such as a checkpoint, if that identifies them."""

    @property
    def digest(self) -> str:
        """Checksum that identifies the weights: a version that is made again after a rewind may have other weights.

        It does not depend on the order of tensors: a learner with layers in 4 bits lists those last, a checkpoint sorts
        by name.
        """
        if self.digest_override is not None:
            return self.digest_override
        # Values, not the repr of the classes: checkpoints store the digest, and a class may be renamed.
        what = [sorted(map(astuple, self.tensors)), None if self.base is None else astuple(self.base)]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        """The size of its tensors."""
        return sum(entry.num_bytes for entry in self.tensors)

    def transfer_timeout_s(self, timeout_s: float) -> float:
        """Return the timeout of a transfer of its tensors: `timeout_s`, extended by their size."""
        return transfer_timeout_s(timeout_s, self.num_bytes)


StoredVersion = tuple[Manifest, list[ray.ObjectRef[Any]]]
"""A manifest, and references to its tensors in the object store, in pieces: whole, or the rows of each rank."""
_RANK_ANSWERS_S = 60.0
# Pieces that arrived on one machine are sent on from there, while the others still arrive. Ray sends whole objects on.
_LEAST_PIECE_BYTES, _MOST_PIECES = 8_000_000, 16


class WeightStore:
    """Actor that owns the newest policy versions."""

    def __init__(self, num_kept: int) -> None:
        """Keep `num_kept` versions; older ones are dropped when newer arrive."""
        self._num_kept = num_kept
        self._versions: dict[int, StoredVersion] = {}
        self._offers: dict[int, tuple[str, Any]] = {}

    def ready(self) -> int:
        """Return the process id while the actor lives; a different id means that it restarted."""
        return os.getpid()

    def keep(self, num_kept: int) -> None:
        """Keep `num_kept` versions from now on: a reused store may have kept fewer."""
        self._num_kept = num_kept

    def publish(self, manifest: Manifest, weights: Mapping[str, NDArray[np.uint8]]) -> None:
        """Take over a version that was `put`. Putting it again makes this actor its owner, instead of a learner that
        may die."""
        self._hold(manifest, [ray.put(piece) for piece in in_pieces(weights, _num_pieces(manifest.num_bytes))])

    def record_offer(self, key: str, rank: int, offer: Any) -> None:
        """Record a rank's offer of its rows, until they are taken.

        `offer` is the rank's actor, which is called for them (`offering.offered_rows`); or a list with the reference to
        its memory, from which every reader fetches them.
        """
        self._offers[rank] = key, offer

    def take(self, manifest: Manifest, key: str, num_ranks: int) -> bool:
        """Take over a version whose rows `num_ranks` ranks offer. Returns False if one of the offers is missing.

        Raises a RayError if a rank has died or does not answer in time.
        """
        made = [self._offers.get(rank) for rank in range(num_ranks)]
        offers = [one[1] for one in made if one is not None and one[0] == key]
        if len(offers) < num_ranks:
            return False
        self._offers.clear()
        if isinstance(offers[0], list):
            self._hold(manifest, [rows for offer in offers for rows in offer])
            return True
        count = _num_pieces(manifest.num_bytes // num_ranks)
        calls = [
            learner.__ray_call__.options(num_returns=count + 1).remote(offered_rows, key, count) for learner in offers
        ]
        ray.get([num_bytes for *_, num_bytes in calls], timeout=manifest.transfer_timeout_s(_RANK_ANSWERS_S))
        self._hold(manifest, [piece for *pieces, _ in calls for piece in pieces])
        return True

    def _hold(self, manifest: Manifest, parts: list[ray.ObjectRef[Any]]) -> None:
        """Hold a version. Drop higher ones, of a future that a resumed run has abandoned, and the oldest."""
        self._versions = {version: held for version, held in self._versions.items() if version < manifest.version}
        self._versions[manifest.version] = (manifest, parts)
        for version in sorted(self._versions)[: -self._num_kept]:
            del self._versions[version]

    def get(self, version: int) -> tuple[Manifest, list[ray.ObjectRef[Any]]]:
        """Return a version's manifest and its weights in parts. Raises VersionMissingError if it is not here (any
        more)."""
        if version not in self._versions:
            raise VersionMissingError(f"policy version {version} is not in the store; it has {sorted(self._versions)}")
        # In a list: a bare reference would be resolved on the way and copied through this actor.
        return self._versions[version]


def _num_pieces(num_bytes: int) -> int:
    return max(1, min(_MOST_PIECES, num_bytes // _LEAST_PIECE_BYTES))


def store_name(run: str) -> str:
    """Return the Ray name of a run's weight store, in the namespace `d1`."""
    return f"d1-weights-{run}"
