"""Ctrl-C and SIGTERM: waiting so that they are seen, and the one raised as the other is."""

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
    """SIGTERM came: `docker stop`, Slurm, Kubernetes."""


def has_ended(fitted: Future[None], limit_s: float = math.inf) -> bool:
    """Wait for the learner group, and say whether it has ended by then.

    In short sleeps: a signal that another thread was given is only seen when the main thread runs, and two that come at
    once break a wait for a lock, which Python then releases without having it.
    """
    deadline = time.monotonic() + limit_s
    while not fitted.done() and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
    return fitted.done()


def wait_for_interrupt() -> None:
    """Stay until Ctrl-C or SIGTERM, which nothing else ends."""
    has_ended(Future())


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
