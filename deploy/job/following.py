"""Driver side of a run under way: shows events, watches the coordinator, stops the run on a signal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from actors.coordination.reporting.status import HUNG_S, SILENT_S, RunStatus
from actors.run_log import Event
from deploy.interrupts import wait_until_done
from deploy.job.background import in_background
from learner.parallel.timeouts import transfer_timeout_s

_POLL_S = 0.5
_STATUS_EVERY_S = 5.0
_START_S = 600.0
_LAST_LOOK_S = 10.0
# A longer gap between two polls, usually under a second apart, means that this process was suspended.
_STALLED_S = 5.0
STOP_GRACE_S = 60.0
"""Seconds that the learner has to write a checkpoint when the run is to stop, plus the time for its bytes."""


class RunFollower:
    """Passes a run's events to a callback, and reports stalls. The coordinator that it polls may be slow or restart."""

    def __init__(self, coordinator: Any, num_seen: int, on_event: Callable[[Event], None]) -> None:
        """Pass every event after the first `num_seen` to `on_event`, on the thread of `follow`."""
        self._coordinator, self._num_seen, self._on_event = coordinator, num_seen, on_event
        self._heard_at = self._said_at = self._asked_at = self._looked_at = time.monotonic()
        # Until it has answered for the first time, it may still be starting.
        self._timeout_s = _START_S

    def follow(self, ended: threading.Event) -> None:
        """Follow until `ended` is set. If the coordinator has failed for good, `fit` reports why."""
        import ray

        pending: Any = None
        while True:
            is_last = ended.wait(_POLL_S)
            # A request that was sent before the end lacks the last events.
            pending = None if is_last else pending
            pending = pending or self._coordinator.events_since.options(max_task_retries=0).remote(self._num_seen)
            self._looked_at, away_s = time.monotonic(), time.monotonic() - self._looked_at
            if away_s > _STALLED_S:
                # This process was suspended, so its own gap is no silence of the coordinator.
                self._heard_at += away_s
            try:
                events = ray.get(pending, timeout=_LAST_LOOK_S if is_last else _POLL_S)
            except ray.exceptions.GetTimeoutError:
                self._note_silence()
            except ray.exceptions.RayError:
                # It died, and Ray restarts it.
                if self._timeout_s == HUNG_S:
                    self._say("the coordinator died; Ray restarts it")
                pending, self._timeout_s = None, _START_S
                self._note_silence()
            else:
                pending, self._heard_at, self._timeout_s = None, time.monotonic(), HUNG_S
                self._show(events)
            if is_last:
                return

    def _show(self, events: list[Event]) -> None:
        import ray

        for event in events:
            self._on_event(event)
        self._num_seen += len(events)
        now = time.monotonic()
        if now - self._asked_at <= _STATUS_EVERY_S:
            return
        self._asked_at = now
        try:
            status: RunStatus = ray.get(self._coordinator.status.remote(), timeout=_POLL_S)
        except ray.exceptions.RayError:
            return  # Its silence is noted with the next events.
        if status.waits:
            self._say("; ".join(status.waits))

    def _note_silence(self) -> None:
        import ray

        now = time.monotonic()
        silent_s = now - self._heard_at
        if silent_s > self._timeout_s:
            self._say(f"the coordinator was silent for {silent_s:.0f} s and is replaced")
            # Its replacement has to start first.
            self._heard_at, self._timeout_s = now, _START_S
            ray.kill(self._coordinator, no_restart=False)
        elif self._timeout_s == HUNG_S and silent_s > SILENT_S and now - self._said_at > SILENT_S:
            self._say(f"the coordinator has been silent for {silent_s:.0f} s")

    def _say(self, what: str) -> None:
        self._said_at = time.monotonic()
        self._on_event({"event": "waits", "what": what})


def following(coordinator: Any, num_seen: int, on_event: Callable[[Event], None]) -> AbstractContextManager[None]:
    """Follow a run, from a background thread, until the block ends."""
    return in_background(RunFollower(coordinator, num_seen, on_event).follow, "d1-events", 2 * _LAST_LOOK_S)


@contextmanager
def checkpoint_on_stop(
    fitted: Future[None], coordinator: Any, on_event: Callable[[Event], None], checkpoint_bytes: int = 0
) -> Iterator[None]:
    """On Ctrl-C or SIGTERM in the block, let the learner write a checkpoint first; a second signal ends the wait.

    `checkpoint_bytes` is the size of that checkpoint, with which the timeout grows.
    """
    import ray

    def say(what: str) -> None:
        on_event({"event": "status", "what": what})

    try:
        yield
    except KeyboardInterrupt:
        try:
            has_learner = ray.get(coordinator.stop.remote(), timeout=STOP_GRACE_S)
        except ray.exceptions.RayError:
            has_learner = True  # The request may have arrived all the same.
        # Before a learner has started nothing can be lost.
        if has_learner:
            say("stopping: the learner writes a checkpoint; a second signal stops it at once")
            within_s = transfer_timeout_s(STOP_GRACE_S, checkpoint_bytes)
            if not wait_until_done(fitted, within_s):
                say(f"the learner wrote no checkpoint within {within_s:.0f} s; --resume goes on from an earlier one")
            elif (error := fitted.exception()) is not None:
                say(f"the learner failed as it stopped: {type(error).__name__}")
        raise
