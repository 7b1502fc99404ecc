"""A movable wall clock: `time.time` of all Python processes of one run.

libfaketime (0.9.10) does not work here: Python's `time.sleep` fails under it, and waits in Ray's C++ are off by the
jump. The monotonic clock stays as it is.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

_VARIABLE = "D1_CHAOS_CLOCK"
_OFFSET_S = struct.Struct("d")
# Python imports this module at startup if it is on the path.
_SITE = "sitecustomize.py"
_ROOT = Path(__file__).parents[2]


class MovableClock:
    """The wall clock of a run."""

    def __init__(self, directory: Path) -> None:
        """Write what the run's processes read into a new `directory`."""
        directory.mkdir()
        self._directory, self._file, self._offset_s = directory, directory / "offset", 0.0
        self._file.write_bytes(_OFFSET_S.pack(0.0))
        (directory / _SITE).write_text("from tests.chaos.clock import install\n\ninstall()\n", encoding="utf-8")

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of processes that use this clock."""
        paths = [str(self._directory), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {_VARIABLE: str(self._file), "PYTHONPATH": os.pathsep.join(paths)}

    def jump(self, seconds: float) -> None:
        """Move the clock in all processes at once."""
        self._offset_s += seconds
        with self._file.open("r+b", buffering=0) as file:
            file.write(_OFFSET_S.pack(self._offset_s))


_seconds, _nanoseconds = time.time, time.time_ns
# One item: the eight bytes of the offset, memory that the session writes.
_offsets: list[bytes | mmap.mmap] = [bytes(_OFFSET_S.size)]


def wall_time() -> float:
    """Replace `time.time`. A module-level function, since pickle stores default arguments of actors by name."""
    return _seconds() + _offset_s()


def wall_time_ns() -> int:
    """Replace `time.time_ns`."""
    return _nanoseconds() + int(1e9 * _offset_s())


def install() -> None:
    """Make this process use the clock that its environment names."""
    with open(os.environ[_VARIABLE], "rb") as file:
        _offsets[0] = mmap.mmap(file.fileno(), _OFFSET_S.size, access=mmap.ACCESS_READ)
    time.time, time.time_ns = wall_time, wall_time_ns


def _offset_s() -> float:
    offset_s: float = _OFFSET_S.unpack(_offsets[0][:])[0]
    return offset_s
