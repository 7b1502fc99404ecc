"""Weight sync, sending side: publishes policy versions to the weight store, again if it lost them.

Without LoRA each rank offers its rows, in the samplers' precision, and the store takes them from each rank. Under LoRA
a version is its adapter: rank 0 gathers it and sends it with the name of its base checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, Protocol

from torch import Tensor

from actors.messages import Generation, Next
from actors.spec import Phase
from actors.training.ending import StopRequestedError
from actors.training.shards import Shipping, Travel
from actors.weights.store import Manifest
from actors.weights.tensors import make_manifest
from learner.model.checkpoint_files import BaseCheckpoint
from learner.parallel.consensus import Ranks
from learner.parallel.sharding import ShardedPolicy

_AS_HELD = Travel()


class PublicationClient(Protocol):
    """Interface to the weight store and the coordinator; implemented by `actors/training/run_client.py`."""

    def offer(self, key: str, rank: int, shards: Mapping[str, Tensor]) -> None: ...
    def take(self, manifest: Manifest, key: str, num_ranks: int) -> bool: ...
    def withdraw(self) -> None: ...
    def publish(self, manifest: Manifest, adapter: Mapping[str, Tensor]) -> None: ...
    def announce(self, generation: Generation, phase: Phase, round_index: int) -> None: ...


class Publisher:
    """Publisher of policy versions. All ranks call every method; `newest` and `digest` are for rank 0."""

    def __init__(
        self,
        policy: ShardedPolicy,
        ranks: Ranks,
        client: PublicationClient,
        asking: Callable[[], AbstractContextManager[None]] = nullcontext,
        travel: Travel = _AS_HELD,
    ) -> None:
        """Create a publisher of a policy.

        Args:
            policy: the trained policy.
            ranks: its ranks.
            client: the rest of the run.
            asking: context that all ranks enter for each request to the run.
            travel: transfer format of weights without LoRA.
        """
        self._policy, self._ranks, self._client, self._asking = policy, ranks, client, asking
        self._shipping = None if policy.lora.rank else Shipping(policy, travel)
        self._num_offers = 0
        self._generation: Generation | None = None
        self.base: BaseCheckpoint | None = None
        """The base checkpoint of the stage's adapter; None without LoRA."""

    @property
    def newest(self) -> Generation:
        """The version that was published last; on rank 0 only."""
        assert self._generation is not None, "a stage publishes before it asks for anything"
        return self._generation

    @property
    def digest(self) -> str | None:
        """Digest of the version that was published last; None before the first, and on the other ranks."""
        return None if self._generation is None else self._generation.digest

    def publish(self, version: int, phase: Phase, round_index: int, known_as: str | None = None) -> None:
        """Publish the policy to the store, and announce it to the service unless it is the control's. A collective.

        Under LoRA `known_as` is the digest of this policy's checkpoint: the initial one has no adapter yet.
        """
        self._send(version, known_as)
        if phase is not Phase.CONTROL:
            self._ranks.on_rank_0(lambda: self._client.announce(self.newest, phase, round_index))

    def answered(self, ask: Callable[[], tuple[str, Any]]) -> Any:
        """Request something from the run, publishing again as long as the store lacks the version; return the result.

        `ask` is a collective that returns a `Next` and the result. Raises StopRequestedError if the run must stop.
        """
        while (answer := self._asked(ask))[0] == Next.PUBLISH:
            self._publish_again()
        if answer[0] == Next.STOP:
            raise StopRequestedError
        return answer[1]

    def _asked(self, ask: Callable[[], tuple[str, Any]]) -> tuple[str, Any]:
        with self._asking():
            return ask()

    def _publish_again(self) -> None:
        """Publish the current policy again under its version, which the weight store has lost."""
        newest = self._ranks.broadcast_decision(lambda: asdict(self.newest))
        self._send(newest["version"], newest["digest"])

    def _send(self, version: int, known_as: str | None) -> None:
        if self._shipping is not None:
            # A store that dies loses the offers.
            while not self._send_shards(version, self._shipping):
                pass
            return
        adapter = self._policy.adapter_on_rank_0()
        self._ranks.on_rank_0(lambda: self._put_adapter(version, adapter, known_as))

    def _send_shards(self, version: int, shipping: Shipping) -> bool:
        """Offer all rows, and let the store take them. Returns False if that must be repeated."""
        shards = shipping.own()
        # The same number on every rank. In the store, these offers replace those of dead ranks.
        self._num_offers += 1
        key = str(self._num_offers)
        self._client.offer(key, self._ranks.rank, shards.rows)
        found = self._ranks.gather(shards.checks)
        try:
            return bool(self._ranks.broadcast_decision(lambda: self._take(shipping.manifest(version, found), key)))
        finally:
            self._client.withdraw()

    def _take(self, manifest: Manifest, key: str) -> bool:
        is_taken = self._client.take(manifest, key, self._ranks.size)
        if is_taken:
            self._generation = Generation(version=manifest.version, digest=manifest.digest)
        return is_taken

    def _put_adapter(self, version: int, adapter: Mapping[str, Tensor], known_as: str | None) -> None:
        assert self.base is not None, "a stage says what its adapter stands on"
        manifest = make_manifest(version, adapter, self.base, known_as)
        self._client.publish(manifest, adapter)
        self._generation = Generation(version=version, digest=manifest.digest)
