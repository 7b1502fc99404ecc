"""Everything that a process has started, to be ended with it: also what those it started have left behind.

Where its raylet was killed, Ray's workers and agents find that out after up to a minute, and hold memory until then.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
# What was about to start another process when it was killed has done so, or has not.
_MAX_SWEEPS = 5


def adopt_orphans() -> None:
    """From now on a process whose parent dies is this one's child, where this one is its forefather. Linux."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants() -> None:
    """SIGKILL all of them."""
    for _ in range(_MAX_SWEEPS):
        if not (found := _descendants()):
            return
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _descendants() -> list[int]:
    """Those that run, the nearest first."""
    children: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
            children[int(parent)].append((int(path.parent.name), state))
    found, below = [], [os.getpid()]
    while below:
        for pid, state in children[below.pop(0)]:
            below.append(pid)
            if state != "Z":
                found.append(pid)
    return found
