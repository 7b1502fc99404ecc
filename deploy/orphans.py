"""Killing of a process's descendants, including orphans whose own parents have died.

When a raylet is killed, Ray's workers and agents notice only after up to a minute, and hold memory until then.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection
from contextlib import suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
# A process may have started another one just before it was killed, so one sweep may not be enough.
_MAX_SWEEPS = 5


def adopt_orphans() -> None:
    """Become a child subreaper: the parent of every descendant whose own parent dies. Linux only."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(spared: Collection[int] = ()) -> None:
    """SIGKILL all descendants of this process except `spared`."""
    _kill_all(lambda: descendants(os.getpid()).difference(spared))


def kill_marked(variable: str, value: str) -> None:
    """SIGKILL all processes that a dead parent started with this environment variable, and their descendants.

    Redis overwrites its environment, so it is found as a descendant.
    """

    def marked() -> set[int]:
        found = {pid for pid in psutil.pids() if is_marked(pid, variable, value)}
        return found.union(*map(descendants, found))

    _kill_all(marked)


def _kill_all(find: Callable[[], set[int]]) -> None:
    for _ in range(_MAX_SWEEPS):
        if not (found := find()):
            return
        for pid in found:
            with suppress(psutil.Error):
                psutil.Process(pid).kill()


def is_marked(pid: int, variable: str, value: str) -> bool:
    """Whether a process was started with this environment variable; False if it has overwritten its environment."""
    with suppress(psutil.Error):
        return psutil.Process(pid).environ().get(variable) == value
    return False


def descendants(pid: int) -> set[int]:
    """Return the running descendants of `pid`."""
    with suppress(psutil.NoSuchProcess):
        return {child.pid for child in psutil.Process(pid).children(recursive=True) if _runs(child)}
    return set()


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
