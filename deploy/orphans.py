"""Killing of a process's descendants, including orphans whose own parents have died.

When a raylet is killed, Ray's workers and agents notice only after up to a minute, and hold memory until then.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

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
    _kill_all(lambda: _below({pid for pid in _pids() if is_marked(pid, variable, value)}))


def _kill_all(find: Callable[[], set[int]]) -> None:
    for _ in range(_MAX_SWEEPS):
        if not (found := find()):
            return
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def is_marked(pid: int, variable: str, value: str) -> bool:
    """Whether a process was started with this environment variable; False if it has overwritten its environment."""
    try:
        return f"{variable}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def descendants(pid: int) -> set[int]:
    """Return the running descendants of `pid`."""
    return _below({pid}) - {pid}


def with_descendants(pids: Collection[int], parents: Mapping[int, int]) -> set[int]:
    """Return `pids` and all their descendants; `parents` maps each process to its parent."""
    found = set(pids)
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return found


def _below(pids: set[int]) -> set[int]:
    parents = {}
    for pid in _pids():
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat", errors="replace") as stat:
            state, parent = stat.read().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                parents[pid] = int(parent)
    return with_descendants(pids, parents)


def _pids() -> Iterator[int]:
    return map(int, filter(str.isdigit, os.listdir("/proc")))
