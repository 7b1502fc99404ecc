"""Redirection of Ray's output into a log file, so that the terminal shows only the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO

_STDERR = 2


@contextmanager
def redirect_native_output(path: Path) -> Iterator[None]:
    """While the block runs, append to `path` what native code writes to stderr and what is printed to stdout.

    Ray's native code logs to stderr; its error listener, which no setting stops, prints to stdout. Python's own output
    to `sys.stderr`, such as tracebacks, is not redirected. The run's display must hold the previous `sys.stdout`.
    """
    with ExitStack() as at_end:
        log = at_end.enter_context(path.open("a", encoding="utf-8", buffering=1))
        terminal = os.dup(_STDERR)
        at_end.callback(os.close, terminal)
        if descriptor_of(sys.stderr) == _STDERR:
            sys.stderr.flush()
            stderr = at_end.enter_context(
                open(terminal, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
            )
            at_end.enter_context(redirect_stderr(stderr))
        at_end.enter_context(redirect_stdout(log))
        os.dup2(log.fileno(), _STDERR)
        at_end.callback(os.dup2, terminal, _STDERR)
        yield


def descriptor_of(stream: TextIO) -> int | None:
    """Return the file descriptor of a stream; None for one in memory, as in tests."""
    try:
        return stream.fileno()
    except OSError:
        return None
