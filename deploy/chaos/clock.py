"""A wall clock that can be moved: `time.time` of every Python process of one run, and of nobody else.

Not by libfaketime: with it (0.9.10) Python's `time.sleep` fails, and waits of Ray's C++ for a moment of the wall clock,
which a real jump moves too, would be off by it. Durations are measured by another clock, which is left alone.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

_VARIABLE = "D1_CHAOS_CLOCK"
_OFFSET_S = struct.Struct("d")
# Python imports this name, where it finds it, as it starts.
_SITE = "sitecustomize.py"


class MovableClock:
    """What a run is told of the time."""

    def __init__(self, directory: Path) -> None:
        """`directory` is new: what the run's processes read."""
        directory.mkdir()
        self._directory, self._file, self._offset_s = directory, directory / "offset", 0.0
        self._file.write_bytes(_OFFSET_S.pack(0.0))
        (directory / _SITE).write_text("from deploy.chaos.clock import install\n\ninstall()\n", encoding="utf-8")

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to see this clock."""
        paths = [str(self._directory), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {_VARIABLE: str(self._file), "PYTHONPATH": os.pathsep.join(paths)}

    def jump(self, seconds: float) -> None:
        """Move it, in all processes at once."""
        self._offset_s += seconds
        with self._file.open("r+b", buffering=0) as file:
            file.write(_OFFSET_S.pack(self._offset_s))


_seconds, _nanoseconds = time.time, time.time_ns
# One: what the clock is off by, eight bytes that others write.
_offsets: list[bytes | mmap.mmap] = [bytes(_OFFSET_S.size)]


def wall_time() -> float:
    """`time.time`. A function of a module, since defaults of what actors are sent are pickled by name."""
    return _seconds() + _offset_s()


def wall_time_ns() -> int:
    """`time.time_ns`."""
    return _nanoseconds() + int(1e9 * _offset_s())


def install() -> None:
    """Have this process see the clock that its environment names."""
    with open(os.environ[_VARIABLE], "rb") as file:
        _offsets[0] = mmap.mmap(file.fileno(), _OFFSET_S.size, access=mmap.ACCESS_READ)
    time.time, time.time_ns = wall_time, wall_time_ns


def _offset_s() -> float:
    offset_s: float = _OFFSET_S.unpack(_offsets[0][:])[0]
    return offset_s
