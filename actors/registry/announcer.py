"""Asynchronous updates of the registry, and so of the service, about a run's policy versions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from actors.event_history import EventHistory
from actors.messages import WeightsId
from actors.registry.files import read_admin, rebuild
from actors.registry.records import PolicyVersion
from actors.registry.registry import Registry
from actors.run_log import VALIDATION, RunLog
from actors.spec import Phase

# The registry answers in a millisecond or two. A version's publisher waits for that, and so repeats the call if this
# process dies meanwhile.
_DELIVERY_TIMEOUT_S = 2.0


class Announcer:
    """Queue of updates to one run's registry, sent in order by a background task. It is never the only copy.

    While the registry is unreachable, updates are queued, and an outage is recorded as one failure, however long it is.
    Rejected updates are recorded, and filled in from the run directory with the next version. So are updates that a
    previous process may have left unsent.
    """

    def __init__(self, registry: Registry, log: RunLog, history: EventHistory, run_dir: Path, store_name: str) -> None:
        """Create it with nothing to send. `history` is that of `log`, `store_name` the Ray name of the run's weight
        store."""
        self._registry, self._log, self._history = registry, log, history
        self._run_dir, self._store_name = run_dir, store_name
        self._lacks_history, self._is_unreachable = True, False
        self._queue: deque[Callable[[], Any]] = deque()
        self._sending: asyncio.Task[None] | None = None

    async def announce(self, weights_id: WeightsId, phase: Phase, round_index: int) -> bool:
        """Publish a version that the store has. Returns whether the registry has received it."""
        call = self._announcement(weights_id, phase, round_index)
        sending = self._enqueue(call)
        if not self._is_unreachable:
            await asyncio.wait((sending,), timeout=_DELIVERY_TIMEOUT_S)
        return sending.done() and call not in self._queue

    def enqueue_first(self, weights_id: WeightsId, phase: Phase, round_index: int) -> None:
        """Queue the newest version, which a previous process did not deliver, before all else.

        A registry that has it already does not change.
        """
        self._queue.append(self._announcement(weights_id, phase, round_index))

    def checkpoint(self, version: int, directory: Path) -> None:
        """Publish that a directory has a version's weights too."""
        self._enqueue(partial(self._registry.add_checkpoint, version, str(directory)))

    def evaluated(self, version: int, label: str, num_correct: int, num_problems: int) -> None:
        """Publish a version's score; after an evaluation on validation problems, also the best version."""
        self._enqueue(partial(self._registry.score, version, num_correct, num_problems))
        best = self._history.evaluations.validated_best() if label == VALIDATION else None
        if best is not None:
            self._enqueue(partial(self._registry.choose_best, best))

    def retry(self) -> None:
        """Retry the queued updates. To be called periodically."""
        if self._queue:
            self._start_sending()

    async def flush(self) -> None:
        """Send all queued updates, or try once more; record a failure if some are left."""
        if self._sending is not None:
            await self._sending
        if self._lacks_history:
            self._queue.append(self._fill)
        if self._queue:
            await self._start_sending()
        if self._queue:
            self._log.note_failure("the registry is still away, and was not told all that the run directory has")

    def pinned(self) -> int | None:
        """Return the version that an operator has pinned."""
        try:
            return read_admin(self._run_dir).pinned
        except ValueError as error:
            self._note_failure(error)
            return None

    def _announcement(self, weights_id: WeightsId, phase: Phase, round_index: int) -> Callable[[], None]:
        version = PolicyVersion(
            version=weights_id.version,
            round=round_index,
            phase=phase,
            num_correct=None,
            num_problems=None,
            checkpoint=None,
            weight_store=self._store_name,
            manifest_digest=weights_id.digest,
        )
        return partial(self._announce, version, self._history.began_at)

    def _announce(self, version: PolicyVersion, run_began_at: float | None) -> None:
        # It knew none if it is new, or if Redis has lost its data.
        self._lacks_history |= not self._registry.announce(version, run_began_at)
        if self._lacks_history:
            self._fill()

    def _fill(self) -> None:
        rebuild(self._registry, self._run_dir)
        self._lacks_history = False

    def _enqueue(self, call: Callable[[], Any]) -> asyncio.Task[None]:
        self._queue.append(call)
        return self._start_sending()

    def _start_sending(self) -> asyncio.Task[None]:
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())
        return self._sending

    async def _send_all(self) -> None:
        """Send updates until the queue is empty or the registry is unreachable."""
        while self._queue:
            call = self._queue.popleft()
            try:
                await asyncio.to_thread(call)
            except ConnectionError as error:
                if not await self._is_up():
                    self._queue.appendleft(call)
                    self._note_outage(error)
                    return
                # The registry is up, so it rejected this update.
                self._lacks_history = True
                self._note_failure(error)
            except Exception as error:  # Otherwise the updates behind it would be lost silently.
                self._note_failure(error)
            self._is_unreachable = False

    async def _is_up(self) -> bool:
        try:
            await asyncio.to_thread(self._registry.ping)
        except ConnectionError:
            return False
        return True

    def _note_outage(self, error: ConnectionError) -> None:
        if not self._is_unreachable:
            self._note_failure(error)
        self._is_unreachable = True

    def _note_failure(self, error: Exception) -> None:
        said = isinstance(error, ConnectionError | ValueError)
        self._log.note_failure(str(error) if said else f"{type(error).__name__}: {error}")
