"""Redirection of Ray's output into a log file, so that the terminal shows only the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_STDERR = 2


@contextmanager
def redirect_native_output(path: Path) -> Iterator[None]:
    """While the block runs, append to `path` what native code writes to stderr and what is printed to stdout.

    Ray's native code logs to stderr; its error listener, which no setting stops, prints to stdout. Python's own output
    to `sys.stderr`, such as tracebacks, is not redirected. The run's display must hold the previous `sys.stdout`.
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
    """Yield Python's stderr: the current one if it does not write to fd 2, else a new one on `terminal`."""
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
