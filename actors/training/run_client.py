"""Learner's client of the coordinator and the weight store, and its heartbeat.

Both actors may die and restart meanwhile: Ray repeats pending calls, which are idempotent. Only rank 0 makes them and
broadcasts the answers (`learner/parallel/consensus.py`); the other ranks just offer their weights.
"""

from __future__ import annotations

import platform
import secrets
import threading
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, ObjectLostError, RayError
from torch import Tensor

from actors.messages import Next, ScoredWorkUnit, TrainedRound, WeightsId, WorkUnitKey, WorkUnitSummary
from actors.resources import OBJECT_STORE
from actors.spec import Phase
from actors.training.limits import OutOfGpuMemoryError
from actors.weights import offering
from actors.weights.store import Manifest
from actors.weights.tensors import as_bytes, put
from learner.parallel.progress import PROGRESS

_CALL_TIMEOUT_S = 600.0
_REPORT_TIMEOUT_S = 10.0
HEARTBEAT_S = 1.0
# A heartbeat takes the coordinator 1.5 to 2 ms of CPU (2 cores of an Intel Xeon, 2026-11-28).
_MAX_HEARTBEATS_PER_S = 200
# Heartbeats without progress after which they also say which line the rank stands at.
_STANDING_BEATS = 10


class RunClient:
    """Blocking client of the run's actors. Each call raises a RayError if the actor is dead for good."""

    def __init__(self, coordinator: Any, store: Any, transport: str = OBJECT_STORE) -> None:
        """Take the actors' handles. `transport`, for weights without LoRA, is the object store or one of Ray Direct
        Transport's."""
        self._coordinator, self._store, self._transport = coordinator, store, transport
        self._unreported: tuple[TrainedRound, Mapping[WorkUnitKey, WorkUnitSummary]] | None = None
        self._announced: Any = None
        # A checkpoint is recorded by the thread that writes it.
        self._reporting = threading.Lock()

    def report_start(self) -> dict[str, int] | None:
        """Report that the learner group starts, and return its micro-batch tokens by recipe section.

        Sections that keep the recipe's value are left out. None if the group must not start: the run has given up on
        it, or the coordinator is dead for good.
        """
        try:
            tokens: dict[str, int] | None = self._call(self._coordinator.learner_starting.remote(secrets.token_hex(8)))
            return tokens
        except ActorDiedError:
            return None  # The coordinator is dead for good: `fit` detects and reports it.

    def learner_started(self, checkpoint: str, position: Mapping[str, Any]) -> None:
        """Report the checkpoint that the group continues from, and its position."""
        self._call(self._coordinator.learner_started.remote(checkpoint, dict(position)))

    def record(self, event: str, values: Mapping[str, Any]) -> None:
        """Append to the run log, after reporting the last trained round."""
        self.report_round()
        self._call(self._coordinator.record.remote(event, dict(values)))

    def stopped(self, position: Mapping[str, Any]) -> None:
        """Report that the learner ends at a position, because the run is to stop, after the last trained round."""
        self.report_round()
        self._call(self._coordinator.stopped.remote(dict(position)))

    def offer(self, key: str, rank: int, shards: Mapping[str, Tensor]) -> None:
        """Offer this rank's rows to the weight store, until they are withdrawn. The only remote call that every rank
        makes."""
        if self._transport == OBJECT_STORE:
            offering.offer(key, {name: as_bytes(rows) for name, rows in shards.items()})
            offer: Any = ray.get_runtime_context().current_actor
        else:
            # Readers fetch them from this process, which holds them as long as a reference exists.
            offer = [ray.put(dict(shards), _tensor_transport=self._transport)]
        self._call(self._store.record_offer.remote(key, rank, offer))

    def take(self, manifest: Manifest, key: str, num_ranks: int) -> bool:
        """Let the store take what all ranks offer under a key. Returns False if it lacks one of the offers."""
        taken = self._store.take.remote(manifest, key, num_ranks)
        return bool(self._call(taken, manifest.transfer_timeout_s(_CALL_TIMEOUT_S)))

    def withdraw(self) -> None:
        """Withdraw this rank's offer, and release its rows."""
        offering.withdraw()

    def publish(self, manifest: Manifest, adapter: Mapping[str, Tensor]) -> None:
        """Publish an adapter to the weight store."""
        self._call(self._store.publish.remote(manifest, put(adapter)), manifest.transfer_timeout_s(_CALL_TIMEOUT_S))

    def announce(self, weights_id: WeightsId, phase: Phase, round_index: int) -> None:
        """Announce a version of the store to the service, without waiting for the registry; the next call collects the
        result."""
        self._await_announcement()
        self._announced = self._coordinator.announce.remote(weights_id, phase, round_index)

    def next_batch(self, round_index: int, weights_id: WeightsId, label: str = "") -> tuple[Next, list[ScoredWorkUnit]]:
        """Return a round's scored work units, once all are in; none if there is something else to do first.

        The same call reports the previous round, so that samplers are busy while that is written to disk. `label`
        starts a background evaluation of the generation, which `evaluate` waits for.
        """
        while True:
            with self._reporting:
                reported, self._unreported = self._unreported, None
                trained = None if reported is None else reported[0]
                asked = self._coordinator.next_batch.remote(round_index, weights_id, trained, label)
                self._await_announcement()
            # No timeout here: the coordinator bounds every attempt of every work unit.
            what, references = ray.get(asked)
            if what is Next.REPORT:
                self._unreported = reported
                self.report_round()
                continue
            try:
                return what, ray.get(references, timeout=_CALL_TIMEOUT_S)
            except (ObjectLostError, GetTimeoutError):
                # They were lost with the process or the machine that owned them.
                self._call(self._coordinator.forget.remote(round_index))

    def published(
        self, round_index: int, weights_id: WeightsId, values: Mapping[str, Any], work_units: list[ScoredWorkUnit]
    ) -> None:
        """Note that a round of `work_units` was trained and its version published; the next call reports it."""
        trained = TrainedRound(round=round_index, weights_id=weights_id, values=dict(values))
        # Keep the summaries only: with the work units, the object store would hold two rounds.
        self._unreported = trained, {scored.work_unit.key: scored.summary for scored in work_units}

    def report_round(self) -> None:
        """Report the last trained round, unless that is done."""
        with self._reporting:
            self._await_announcement()
            if self._unreported is None:
                return
            trained, summaries = self._unreported
            if not self._call(self._coordinator.published.remote(trained, None)):
                # It has restarted since it returned the work units, and needs their summaries.
                self._call(self._coordinator.published.remote(trained, summaries))
            self._unreported = None

    def _await_announcement(self) -> None:
        """Wait until the last announcement is delivered."""
        announced, self._announced = self._announced, None
        if announced is not None:
            self._call(announced)

    def evaluate(self, weights_id: WeightsId, label: str, round_index: int, *, is_new: bool) -> Next:
        """Evaluate a version, or wait for its background evaluation."""
        self.report_round()
        what: Next = ray.get(self._coordinator.evaluate.remote(weights_id, label, round_index, is_new))
        return what

    def versions_to_keep(self) -> list[int]:
        """Return the versions whose checkpoints must stay: the best, and one that an operator has pinned."""
        return list(self._call(self._coordinator.versions_to_keep.remote()))

    def _call(self, reference: Any, timeout_s: float = _CALL_TIMEOUT_S) -> Any:
        return ray.get(reference, timeout=timeout_s)


def _controller() -> Any:
    """Return Ray Train's controller, the actor that started this rank."""
    # Private: the public context does not name the controller, which the coordinator has to probe.
    from ray.train.v2._internal.execution.context import get_train_context

    return get_train_context().controller_actor


def heartbeat_interval_s(num_ranks: int) -> float:
    """Return the seconds between heartbeats of a rank, so that all ranks together do not overload the coordinator."""
    return max(HEARTBEAT_S, num_ranks / _MAX_HEARTBEATS_PER_S)


class Heartbeat:
    """Heartbeat thread of one rank: sends its progress, and receives stop requests of the coordinator."""

    def __init__(self, coordinator: Any, rank: int, num_ranks: int) -> None:
        """Start the thread. The caller is the training thread."""
        self._coordinator, self._rank = coordinator, rank
        self._interval_s = heartbeat_interval_s(num_ranks)
        self._me = ray.get_runtime_context().current_actor
        self._controller = _controller() if rank == 0 else None
        self._node, self._training_thread = platform.node(), threading.get_ident()
        self.doing = "starting"
        self.must_stop = False
        """A stop was requested."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def doing(self) -> str:
        """The rank's activity, as readable text."""
        return PROGRESS.place.activity

    @doing.setter
    def doing(self, activity: str) -> None:
        PROGRESS.begin(activity)

    def end(self) -> None:
        """Report that the rank has ended, so that no more heartbeats are expected."""
        self._ended.set()
        self._thread.join(_REPORT_TIMEOUT_S)
        self._result_of(self._coordinator.rank_ended.remote(self._rank))

    def report(self, error: Exception, *, is_echo: bool) -> bool:
        """Report why the rank has failed, for the run log. Returns False if the group must not restart.

        An echo is the failure of a collective because another rank has died; the transport's message is in Ray's logs.
        """
        what = (
            f"rank {self._rank} lost its connection to another rank" if is_echo else f"{type(error).__name__}: {error}"
        )
        too_large: str | None = None
        if isinstance(error, OutOfGpuMemoryError):
            what, too_large = str(error), error.section
        is_transient = isinstance(error, (RayError, OSError))
        failed = self._coordinator.learner_failed.remote(what, is_echo, is_transient, too_large)
        return bool(self._result_of(failed, otherwise=True))

    def _beat(self) -> None:
        last, num_equal = PROGRESS.place, 0
        while not self._ended.wait(self._interval_s):
            place = PROGRESS.place
            num_equal = num_equal + 1 if place.is_same_as(last) else 0
            last = place
            if num_equal >= _STANDING_BEATS:
                place = place.with_line(self._training_thread)
            heartbeat = self._coordinator.heartbeat.options(max_task_retries=0)
            words = self._rank, place, self._me, self._node, self._controller
            said = self._result_of(heartbeat.remote(*words), otherwise=self.must_stop)
            self.must_stop = bool(said)

    def _result_of(self, reference: Any, otherwise: Any = None) -> Any:
        try:
            return ray.get(reference, timeout=_REPORT_TIMEOUT_S)
        except RayError:
            # It is restarting or dead; calls that wait for its answer report that.
            return otherwise
