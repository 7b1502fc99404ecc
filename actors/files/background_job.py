"""A job on a background thread, which many callers request: one run at a time, and at most one that waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundJob:
    """A job on its own thread. Requests made while one waits share its run, so the queue has at most one entry."""

    def __init__(self, job: Callable[[], None], name: str) -> None:
        """Begin idle. The thread starts with the first request."""
        self._job, self._lock = job, threading.Lock()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._next: Future[None] | None = None
        self._began: float | None = None
        self._is_closed = False

    def request(self) -> Future[None]:
        """Return the result of a run that begins after this call. After `close` nothing runs, and it is done."""
        with self._lock:
            if self._is_closed:
                closed: Future[None] = Future()
                closed.set_result(None)
                return closed
            if self._next is None:
                self._next = self._executor.submit(self._run)
            return self._next

    def running_s(self) -> float:
        """Return for how many seconds the current run has lasted; 0 if there is none."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """Wait until all requested runs have ended, and end the thread."""
        with self._lock:
            self._is_closed = True
        self._executor.shutdown(wait=True)

    def _run(self) -> None:
        with self._lock:
            self._next = None
        self._began = time.monotonic()
        try:
            self._job()
        finally:
            self._began = None
