"""Handling of Ctrl-C and SIGTERM: interruptible waits, and SIGTERM raised as an exception too."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

_LOOK_EVERY_S = 0.1


class Terminated(KeyboardInterrupt):
    """SIGTERM was received, as from `docker stop`, Slurm or Kubernetes."""


def wait_until_done(fitted: Future[None], limit_s: float = math.inf) -> bool:
    """Wait for the learner group, and return whether it has ended within `limit_s`.

    The wait is in short sleeps. A signal delivered to another thread is only handled when the main thread runs, and two
    signals at once break a wait for a lock, which Python then releases without holding it.
    """
    deadline = time.monotonic() + limit_s
    while not fitted.done() and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
    return fitted.done()


def wait_for_interrupt() -> None:
    """Wait until Ctrl-C or SIGTERM raises; nothing else ends the wait."""
    wait_until_done(Future())


@contextmanager
def terminated_by_sigterm() -> Iterator[None]:
    """Within the block SIGTERM raises `Terminated` in the main thread, as Ctrl-C raises KeyboardInterrupt."""

    def end(*_: object) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
