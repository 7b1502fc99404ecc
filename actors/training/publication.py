"""Publishing policy versions to the weight store, again where that has lost them.

Of weights that are all trained each rank offers its rows, in the samplers' precision, and the store takes them from
each. Under LoRA a version is its adapter, which rank 0 gathers and hands over, with the name of the checkpoint that it
stands on.
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
from learner.model.checkpoint_files import Base
from learner.parallel.ranks import Ranks
from learner.parallel.sharding import ShardedPolicy

_AS_HELD = Travel()


class PublicationClient(Protocol):
    """Whom they are handed to: `actors/training/run_client.py`."""

    def offer(self, key: str, rank: int, shards: Mapping[str, Tensor]) -> None: ...
    def take(self, manifest: Manifest, key: str, num_ranks: int) -> bool: ...
    def withdraw(self) -> None: ...
    def publish(self, manifest: Manifest, adapter: Mapping[str, Tensor]) -> None: ...
    def announce(self, generation: Generation, phase: Phase, round_index: int) -> None: ...


class Publisher:
    """Publishes; all ranks call every method of it, but for what rank 0 alone knows."""

    def __init__(
        self,
        policy: ShardedPolicy,
        ranks: Ranks,
        client: PublicationClient,
        asking: Callable[[], AbstractContextManager[None]] = nullcontext,
        travel: Travel = _AS_HELD,
    ) -> None:
        """Publish a policy.

        Args:
            policy: what is trained.
            ranks: its ranks.
            client: the run.
            asking: entered by all ranks for each thing that the run is asked for.
            travel: of weights that are all trained.
        """
        self._policy, self._ranks, self._client, self._asking = policy, ranks, client, asking
        self._shipping = None if policy.lora.rank else Shipping(policy, travel)
        self._num_offers = 0
        self._generation: Generation | None = None
        self.base: Base | None = None
        """The base checkpoint of the stage's adapter; None without LoRA."""

    @property
    def newest(self) -> Generation:
        """On rank 0: what was published last."""
        assert self._generation is not None, "a stage publishes before it asks for anything"
        return self._generation

    @property
    def digest(self) -> str | None:
        """The checksum of what was published last; None before that, and on the other ranks."""
        return None if self._generation is None else self._generation.digest

    def publish(self, version: int, phase: Phase, round_index: int, known_as: str | None = None) -> None:
        """Hand the policy to the store; the service hears of all versions but the control's. A collective.

        Under LoRA `known_as` is the digest that the checkpoint of this policy has: the initial one has no adapter yet.
        """
        self._send(version, known_as)
        if phase is not Phase.CONTROL:
            self._ranks.on_rank_0(lambda: self._client.announce(self.newest, phase, round_index))

    def answered(self, ask: Callable[[], tuple[str, Any]]) -> Any:
        """What the run answers to `ask`, a collective that says `Next` first, once the store has what it is about.

        Raises StopRequestedError where the run is to stop.
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
        """The weight store has lost what was published last, which is what the policy still is."""
        newest = self._ranks.agreed(lambda: asdict(self.newest))
        self._send(newest["version"], newest["digest"])

    def _send(self, version: int, known_as: str | None) -> None:
        if self._shipping is not None:
            # The store forgets offers where it dies.
            while not self._send_shards(version, self._shipping):
                pass
            return
        adapter = self._policy.adapter_on_rank_0()
        self._ranks.on_rank_0(lambda: self._put_adapter(version, adapter, known_as))

    def _send_shards(self, version: int, shipping: Shipping) -> bool:
        """Offer all rows, and let the store take them. False where it has to be done again."""
        shards = shipping.own()
        # As many on every rank. Those of ranks that are gone the store has forgotten for these.
        self._num_offers += 1
        key = str(self._num_offers)
        self._client.offer(key, self._ranks.rank, shards.rows)
        found = self._ranks.gathered(shards.checks)
        try:
            return bool(self._ranks.agreed(lambda: self._take(shipping.manifest(version, found), key)))
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
