"""What rank 0 of a learner asks of the rest of its run: the coordinator and the weight store.

Both may die and be started again meanwhile: Ray makes the calls that were under way again, and what they ask for can be
asked twice. Nobody but rank 0 asks; the other ranks hear of it (`learner/parallel/ranks.py`), and offer their weights.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, ObjectLostError, RayError
from torch import Tensor

from actors.messages import Generation, Next, PortionKey, PortionSummary, ScoredPortion, TrainedRound
from actors.resources import OBJECT_STORE
from actors.spec import Phase
from actors.training.ending import OutOfGpuMemoryError
from actors.weights import offering
from actors.weights.store import Manifest
from actors.weights.tensors import as_bytes, put

_CALL_TIMEOUT_S = 600.0
_REPORT_TIMEOUT_S = 10.0
HEARTBEAT_S = 1.0


class RunClient:
    """Calls that wait for their answer. Each raises a RayError where whom it asks is gone for good."""

    def __init__(self, coordinator: Any, store: Any, transport: str = OBJECT_STORE) -> None:
        """Take over the handles; `transport` of weights that are all trained is the object store, or has a name of Ray
        Direct Transport's."""
        self._coordinator, self._store, self._transport = coordinator, store, transport
        self._untold: tuple[TrainedRound, Mapping[PortionKey, PortionSummary]] | None = None
        self._announced: Any = None
        # A checkpoint is recorded by the thread that writes it.
        self._telling = threading.Lock()

    def starting(self) -> dict[str, int] | None:
        """The learner group begins, or begins again: how many tokens its micro-batches have, by the section of the
        recipe, where that is not what the recipe says. None where it has begun in vain too often, or is of no use."""
        try:
            tokens: dict[str, int] | None = self._call(self._coordinator.learner_starting.remote(secrets.token_hex(8)))
            return tokens
        except ActorDiedError:
            return None  # The coordinator is gone for good: `fit` finds that out and says so.

    def learner_started(self, checkpoint: str, position: Mapping[str, Any]) -> None:
        """It goes on from a checkpoint, which says where the run stood."""
        self._call(self._coordinator.learner_started.remote(checkpoint, dict(position)))

    def record(self, event: str, values: Mapping[str, Any]) -> None:
        """Append to the run log, behind the round that was trained on last."""
        self.tell()
        self._call(self._coordinator.record.remote(event, dict(values)))

    def offer(self, key: str, rank: int, shards: Mapping[str, Tensor]) -> None:
        """Offer this rank's rows to the weight store, until they are withdrawn. Every rank does, and no other call."""
        if self._transport == OBJECT_STORE:
            offering.offer(key, {name: as_bytes(rows) for name, rows in shards.items()})
            offer: Any = ray.get_runtime_context().current_actor
        else:
            # Whoever has the reference fetches them from this process, which holds them as long as somebody has it.
            offer = [ray.put(dict(shards), _tensor_transport=self._transport)]
        self._call(self._store.offered.remote(key, rank, offer))

    def take(self, manifest: Manifest, key: str, num_ranks: int) -> bool:
        """Let the store take what all ranks offer under a key. False where it does not know of all offers."""
        taken = self._store.take.remote(manifest, key, num_ranks)
        return bool(self._call(taken, manifest.travel_s(_CALL_TIMEOUT_S)))

    def withdraw(self) -> None:
        """Offer nothing any more, and hold nothing of it."""
        offering.withdraw()

    def publish(self, manifest: Manifest, adapter: Mapping[str, Tensor]) -> None:
        """Hand an adapter to the weight store."""
        self._call(self._store.publish.remote(manifest, put(adapter)), manifest.travel_s(_CALL_TIMEOUT_S))

    def announce(self, generation: Generation, phase: Phase, round_index: int) -> None:
        """Tell the service that the store has a version. Nobody waits for the registry: the next call finds out whether
        it was told."""
        self._hear()
        self._announced = self._coordinator.announce.remote(generation, phase, round_index)

    def next_batch(self, round_index: int, generation: Generation, label: str = "") -> tuple[Next, list[ScoredPortion]]:
        """A round's scored portions, once all are in; none where there is something else to do first.

        Also tells of the round before: one call, so that samplers are at work while that is written down. `label` is
        of an evaluation of the generation that begins meanwhile, and that `evaluate` waits for.
        """
        while True:
            with self._telling:
                told, self._untold = self._untold, None
                trained = None if told is None else told[0]
                asked = self._coordinator.next_batch.remote(round_index, generation, trained, label)
                self._hear()
            # Without a limit of its own: the coordinator bounds every try of every portion.
            what, references = ray.get(asked)
            if what is Next.TELL:
                self._untold = told
                self.tell()
                continue
            try:
                return what, ray.get(references, timeout=_CALL_TIMEOUT_S)
            except (ObjectLostError, GetTimeoutError):
                # They went with the process or the machine that owned them.
                self._call(self._coordinator.forget.remote(round_index))

    def published(
        self, round_index: int, generation: Generation, values: Mapping[str, Any], portions: list[ScoredPortion]
    ) -> None:
        """A round of `portions` was trained on, and gave a version: the coordinator hears of it by the next call."""
        trained = TrainedRound(round=round_index, generation=generation, values=dict(values))
        # Not the portions: the object store would have two rounds of them.
        self._untold = trained, {scored.portion.key: scored.summary for scored in portions}

    def tell(self) -> None:
        """Tell of the round that was trained on last, unless that is done."""
        with self._telling:
            self._hear()
            if self._untold is None:
                return
            trained, summaries = self._untold
            if not self._call(self._coordinator.published.remote(trained, None)):
                # It has restarted since it gave us the portions.
                self._call(self._coordinator.published.remote(trained, summaries))
            self._untold = None

    def _hear(self) -> None:
        """Wait for what was announced last to be known."""
        announced, self._announced = self._announced, None
        if announced is not None:
            self._call(announced)

    def evaluate(self, generation: Generation, label: str, round_index: int, *, is_new: bool) -> Next:
        """Evaluate a version, or wait for the evaluation that has begun beside a round."""
        self.tell()
        what: Next = ray.get(self._coordinator.evaluate.remote(generation, label, round_index, is_new))
        return what

    def versions_to_keep(self) -> list[int]:
        """The versions whose checkpoints must stay: the best, and one that an operator has pinned."""
        return list(self._call(self._coordinator.versions_to_keep.remote()))

    def _call(self, reference: Any, timeout_s: float = _CALL_TIMEOUT_S) -> Any:
        return ray.get(reference, timeout=timeout_s)


def _controller() -> Any:
    """The actor of Ray Train that has started this rank."""
    from ray.train.v2._internal.execution.context import get_train_context

    return get_train_context().controller_actor


class Heartbeat:
    """Signs of life of one rank, from a thread: what it is at; and back what the coordinator wants of it."""

    def __init__(self, coordinator: Any, rank: int) -> None:
        """Begin."""
        self._coordinator, self._rank = coordinator, rank
        self._me = ray.get_runtime_context().current_actor
        self._controller = _controller() if rank == 0 else None
        self.doing = "starting"
        """What the rank is at, for people."""
        self.must_stop = False
        """Somebody wants the run to stop."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """The rank has ended, and is missed no more."""
        self._ended.set()
        self._thread.join(_REPORT_TIMEOUT_S)
        self._say(self._coordinator.rank_ended.remote(self._rank))

    def report(self, error: Exception, *, is_echo: bool) -> bool:
        """The rank has failed, and the run log must say why. False where the group is not to start again.

        An echo is the failure of a collective whose other end has died; what the transport says of it is in Ray's logs.
        """
        what = f"rank {self._rank} lost another" if is_echo else f"{type(error).__name__}: {error}"
        too_large: str | None = None
        if isinstance(error, OutOfGpuMemoryError):
            what, too_large = str(error), error.section
        is_transient = isinstance(error, (RayError, OSError))
        failed = self._coordinator.learner_failed.remote(what, is_echo, is_transient, too_large)
        return bool(self._say(failed, otherwise=True))

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            heartbeat = self._coordinator.heartbeat.options(max_task_retries=0)
            words = self._rank, self.doing, self._me, self._controller
            said = self._say(heartbeat.remote(*words), otherwise=self.must_stop)
            self.must_stop = bool(said)

    def _say(self, reference: Any, otherwise: Any = None) -> Any:
        try:
            return ray.get(reference, timeout=_REPORT_TIMEOUT_S)
        except RayError:
            # It restarts, or is gone: whoever waits for its answer says so.
            return otherwise
