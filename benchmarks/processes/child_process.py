"""A command as a child process, with the time of each line that it prints."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputLine:
    """A line of output."""

    at_s: float
    """Time of arrival, on the monotonic clock."""
    text: str
    """Text without its line end."""


class ChildProcess:
    """A running command in its own process group, with stderr merged into stdout."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the command."""
        self.began_s = time.monotonic()
        self.ended_s: float | None = None
        self._lines: list[OutputLine] = []
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="d1-child-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, -9 after SIGKILL; None while it runs."""
        status = self._process.poll()
        if status is not None and self.ended_s is None:
            self.ended_s = time.monotonic()
        return status

    @property
    def lines(self) -> tuple[OutputLine, ...]:
        """Output so far."""
        return tuple(self._lines)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone, not to its children."""
        if self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        _ = self.status

    def close(self) -> None:
        """Read the remaining output, which ends when no descendant has the pipe open."""
        self._reader.join(timeout=10.0)
        if not self._reader.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(OutputLine(at_s=time.monotonic(), text=line.rstrip()))
