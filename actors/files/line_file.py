"""Append-only files of lines: each line is in the file once and whole, or buffered in memory, in order."""

from __future__ import annotations

import os
from pathlib import Path

_BLOCK_BYTES = 1 << 16


class LineFile:
    """Append-only file of lines. One thread may write while others add lines."""

    def __init__(self, path: Path, *, is_synced: bool = True) -> None:
        """Open for appending, and cut off a last line that a crash truncated, which would corrupt the next one.

        With `is_synced`, written lines are on disk (fsync).
        """
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._is_synced = is_synced
        self._waiting: list[bytes] = []
        os.ftruncate(self._file, _end_of_last_line(self._file))

    @property
    def num_waiting(self) -> int:
        """Number of buffered lines."""
        return len(self._waiting)

    def add(self, line: str) -> None:
        """Buffer a line, which must contain no newline."""
        self._waiting.append(line.encode(errors="backslashreplace") + b"\n")

    def write_out(self, count: int | None = None) -> None:
        """Write the first `count` buffered lines, by default all, with one fsync. Raises OSError.

        The file has whole lines only, also after an error. Lines before the one that did not fit are then in it.
        """
        lines, num_written, failed = self._waiting[:count], 0, None
        before = end = os.fstat(self._file).st_size
        try:
            for line in lines:
                _write_all(self._file, line)
                end, num_written = end + len(line), num_written + 1
        except OSError as error:
            os.ftruncate(self._file, end)
            failed = error
        if num_written and self._is_synced:
            self._sync(before)
        del self._waiting[:num_written]
        if failed is not None:
            raise failed

    def _sync(self, before: int) -> None:
        """Sync the file. If that fails, drop what was written since it had `before` bytes, and raise OSError."""
        try:
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, before)
            raise

    def close(self) -> None:
        """Write the buffered lines, and close. Raises OSError if they cannot be written."""
        try:
            self.write_out()
        finally:
            # The OS may reuse the descriptor, and late writes must not reach another file.
            file, self._file = self._file, -1
            os.close(file)


def _end_of_last_line(file: int) -> int:
    """Return the size of a file up to its last newline. Reads backwards: the file may be large."""
    end = os.fstat(file).st_size
    while end > 0:
        begin = max(0, end - _BLOCK_BYTES)
        newline = os.pread(file, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


def _write_all(file: int, data: bytes) -> None:
    """Write all of `data`: a nearly full disk may accept only its beginning."""
    while data:
        data = data[os.write(file, data) :]
