"""One `d1 train` as a child process, and what it prints, line by line with the time of each."""

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
    """When it came, on the session's clock."""
    text: str
    """Without its end."""


class Driver:
    """A command in a process group of its own. Standard error is read as output."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it."""
        self.began_s = time.monotonic()
        self.ended_s: float | None = None
        self._lines: list[OutputLine] = []
        self._process = subprocess.Popen(  # noqa: S603 - d1 itself
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="d1-chaos-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, -9 after SIGKILL; None while it runs."""
        status = self._process.poll()
        if status is not None and self.ended_s is None:
            self.ended_s = time.monotonic()
        return status

    @property
    def lines(self) -> tuple[OutputLine, ...]:
        """What it has printed."""
        return tuple(self._lines)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it alone, not to its children."""
        if self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        _ = self.status

    def close(self) -> None:
        """Read what is left of its output, once no process of its family has it open any more."""
        self._reader.join(timeout=10.0)
        if not self._reader.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(OutputLine(at_s=time.monotonic(), text=line.rstrip()))
