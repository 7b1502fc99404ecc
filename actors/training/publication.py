"""Publishing policy versions: rank 0 hands the gathered weights to the weight store, again where that has lost them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from actors.messages import Generation, Next
from actors.spec import Phase
from actors.training.ending import StopRequestedError
from actors.weight_store import Manifest
from actors.weights import make_manifest
from learner.parallel.ranks import Ranks
from learner.parallel.sharding import ShardedPolicy


class PublicationClient(Protocol):
    """Whom rank 0 hands them to: `actors/training/run_client.py`."""

    def publish(self, manifest: Manifest, weights: Mapping[str, Tensor]) -> None: ...
    def announce(self, generation: Generation, phase: Phase, round_index: int) -> None: ...


class Publisher:
    """Publishes from rank 0; the other ranks help to gather the weights."""

    def __init__(self, policy: ShardedPolicy, ranks: Ranks, client: PublicationClient) -> None:
        self._policy, self._ranks, self._client = policy, ranks, client
        self._generation: Generation | None = None

    @property
    def newest(self) -> Generation:
        """On rank 0: what was published last."""
        assert self._generation is not None, "a stage publishes before it asks for anything"
        return self._generation

    @property
    def digest(self) -> str | None:
        """The checksum of what was published last; None before that, and on the other ranks."""
        return None if self._generation is None else self._generation.digest

    def publish(self, version: int, phase: Phase, round_index: int) -> None:
        """Hand the weights to the store; the service hears of all versions but the control's. A collective."""
        weights = self._policy.weights_on_rank_0()

        def on_rank_0() -> None:
            self._put(version, weights)
            if phase is not Phase.CONTROL:
                self._client.announce(self.newest, phase, round_index)

        self._ranks.on_rank_0(on_rank_0)

    def answered(self, ask: Callable[[], tuple[str, Any]]) -> Any:
        """What the run answers to `ask`, a collective that says `Next` first, once the store has what it is about.

        Raises StopRequestedError where the run is to stop.
        """
        while (answer := ask())[0] == Next.PUBLISH:
            self._publish_again()
        if answer[0] == Next.STOP:
            raise StopRequestedError
        return answer[1]

    def _publish_again(self) -> None:
        """The weight store has lost what was published last, which is what the policy still is."""
        weights = self._policy.weights_on_rank_0()
        self._ranks.on_rank_0(lambda: self._put(self.newest.version, weights))

    def _put(self, version: int, weights: Mapping[str, Tensor]) -> None:
        manifest = make_manifest(version, weights)
        self._generation = Generation(version=version, digest=manifest.digest)
        self._client.publish(manifest, weights)
