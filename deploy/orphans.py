"""Everything that a process has started, to be ended with it: also what those it started have left behind.

Where its raylet was killed, Ray's workers and agents find that out after up to a minute, and hold memory until then.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
# What was about to start another process when it was killed has done so, or has not.
_MAX_SWEEPS = 5


def adopt_orphans() -> None:
    """From now on a process whose parent dies is this one's child, where this one is its forefather. Linux."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """From now on this process, one of a pool, ends where its parent does: killed, that ends nobody, and who waits for
    its work would hold memory for ever."""
    threading.Thread(target=_wait_for_parent, name="d1-parent", daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def kill_descendants(spared: Collection[int] = ()) -> None:
    """SIGKILL all of them but those of `spared`."""
    _kill_all(lambda: descendants(os.getpid()).difference(spared))


def kill_marked(variable: str, value: str) -> None:
    """SIGKILL all processes that were started with this in their environment, by a parent that is gone.

    Redis writes over its own: it is known by its parent.
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
    """Whether a process was started with this in its environment; not known of one that has written over it."""
    try:
        return f"{variable}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def descendants(pid: int) -> set[int]:
    """Processes below `pid` that run."""
    return _below({pid}) - {pid}


def with_descendants(pids: Collection[int], parents: Mapping[int, int]) -> set[int]:
    """`pids` and all below them, where `parents` has the parent of each process."""
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
