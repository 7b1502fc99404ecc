"""A place for what Ray says, on a screen that is for the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_STDERR = 2


@contextmanager
def native_words_in(path: Path) -> Iterator[None]:
    """While the block runs, append to `path` what native code writes to standard error and what is printed to stdout.

    Ray's native code logs to the first; its listener for errors, which no setting stops, prints to the second. What
    Python writes to `sys.stderr`, tracebacks among it, goes where it went. The run's own display must hold the
    `sys.stdout` from before.
    """
    screen, out = sys.stderr, sys.stdout
    with path.open("a", encoding="utf-8", buffering=1) as log:
        terminal = os.dup(_STDERR)
        try:
            with _stderr_at(terminal, screen) as stderr:
                os.dup2(log.fileno(), _STDERR)
                sys.stderr, sys.stdout = stderr, log
                try:
                    yield
                finally:
                    sys.stderr, sys.stdout = screen, out
                    os.dup2(terminal, _STDERR)
        finally:
            os.close(terminal)


@contextmanager
def _stderr_at(terminal: int, screen: TextIO) -> Iterator[TextIO]:
    """Python's standard error: what it is now if that does not go through the file descriptor, else another on it."""
    try:
        is_native = screen.fileno() == _STDERR
    except OSError:
        is_native = False  # A test's, in memory.
    if not is_native:
        yield screen
        return
    screen.flush()
    with open(terminal, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False) as stderr:
        yield stderr
