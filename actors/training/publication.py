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

from actors.messages import Next, WeightsId
from actors.spec import Phase
from actors.training.limits import StopRequestedError
from actors.training.shards import ShardExporter, TransferFormat
from actors.weights.store import Manifest
from actors.weights.tensors import make_manifest
from learner.model.checkpoint_files import BaseCheckpoint
from learner.parallel.consensus import Ranks
from learner.parallel.sharding import ShardedPolicy

_DEFAULT_FORMAT = TransferFormat()


class PublicationClient(Protocol):
    """Interface to the weight store and the coordinator; implemented by `actors/training/run_client.py`."""

    def offer(self, key: str, rank: int, shards: Mapping[str, Tensor]) -> None: ...
    def take(self, manifest: Manifest, key: str, num_ranks: int) -> bool: ...
    def withdraw(self) -> None: ...
    def publish(self, manifest: Manifest, adapter: Mapping[str, Tensor]) -> None: ...
    def announce(self, weights_id: WeightsId, phase: Phase, round_index: int) -> None: ...


class Publisher:
    """Publisher of policy versions. All ranks call every method; `newest` and `digest` are for rank 0."""

    def __init__(
        self,
        policy: ShardedPolicy,
        ranks: Ranks,
        client: PublicationClient,
        request_context: Callable[[], AbstractContextManager[None]] = nullcontext,
        transfer_format: TransferFormat = _DEFAULT_FORMAT,
    ) -> None:
        """Create a publisher of a policy.

        Args:
            policy: the trained policy.
            ranks: its ranks.
            client: the rest of the run.
            request_context: context that all ranks enter for each request to the run.
            transfer_format: format of weights without LoRA.
        """
        self._policy, self._ranks, self._client, self._request_context = policy, ranks, client, request_context
        self._exporter = None if policy.lora.rank else ShardExporter(policy, transfer_format)
        self._num_offers = 0
        self._weights_id: WeightsId | None = None
        self.base: BaseCheckpoint | None = None
        """The base checkpoint of the stage's adapter; None without LoRA."""

    @property
    def newest(self) -> WeightsId:
        """The version that was published last; on rank 0 only."""
        assert self._weights_id is not None, "a stage publishes before it asks for anything"
        return self._weights_id

    @property
    def digest(self) -> str | None:
        """Digest of the version that was published last; None before the first, and on the other ranks."""
        return None if self._weights_id is None else self._weights_id.digest

    def publish(self, version: int, phase: Phase, round_index: int, digest_override: str | None = None) -> None:
        """Publish the policy to the store, and announce it to the service unless it is the control's. A collective.

        Under LoRA `digest_override` is the digest of this policy's checkpoint: the initial one has no adapter yet.
        """
        self._send(version, digest_override)
        if phase is not Phase.CONTROL:
            self._ranks.on_rank_0(lambda: self._client.announce(self.newest, phase, round_index))

    def request_with_republish(self, ask: Callable[[], tuple[str, Any]]) -> Any:
        """Request something from the run, publishing again as long as the store lacks the version; return the result.

        `ask` is a collective that returns a `Next` and the result. Raises StopRequestedError if the run must stop.
        """
        while (answer := self._request(ask))[0] == Next.PUBLISH:
            self._publish_again()
        if answer[0] == Next.STOP:
            raise StopRequestedError
        return answer[1]

    def _request(self, ask: Callable[[], tuple[str, Any]]) -> tuple[str, Any]:
        with self._request_context():
            return ask()

    def _publish_again(self) -> None:
        """Publish the current policy again under its version, which the weight store has lost."""
        newest = self._ranks.broadcast_decision(lambda: asdict(self.newest))
        self._send(newest["version"], newest["digest"])

    def _send(self, version: int, digest_override: str | None) -> None:
        if self._exporter is not None:
            # A store that dies loses the offers.
            while not self._send_shards(version, self._exporter):
                pass
            return
        adapter = self._policy.adapter_on_rank_0()
        self._ranks.on_rank_0(lambda: self._put_adapter(version, adapter, digest_override))

    def _send_shards(self, version: int, exporter: ShardExporter) -> bool:
        """Offer all rows, and let the store take them. Returns False if that must be repeated."""
        shards = exporter.local_shards()
        # The same number on every rank. In the store, these offers replace those of dead ranks.
        self._num_offers += 1
        key = str(self._num_offers)
        self._client.offer(key, self._ranks.rank, shards.rows)
        found = self._ranks.gather(shards.checks)
        try:
            return bool(self._ranks.broadcast_decision(lambda: self._take(exporter.manifest(version, found), key)))
        finally:
            self._client.withdraw()

    def _take(self, manifest: Manifest, key: str) -> bool:
        is_taken = self._client.take(manifest, key, self._ranks.size)
        if is_taken:
            self._weights_id = WeightsId(version=manifest.version, digest=manifest.digest)
        return is_taken

    def _put_adapter(self, version: int, adapter: Mapping[str, Tensor], digest_override: str | None) -> None:
        assert self.base is not None, "a stage says what its adapter stands on"
        manifest = make_manifest(version, adapter, self.base, digest_override)
        self._client.publish(manifest, adapter)
        self._weights_id = WeightsId(version=version, digest=manifest.digest)
