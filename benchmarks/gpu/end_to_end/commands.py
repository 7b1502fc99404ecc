"""d1's commands as child processes, which are stopped together with their descendants."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.gpu.end_to_end.memory import MemoryWatch
from benchmarks.gpu.end_to_end.visit import StageError, Visit
from benchmarks.processes.child_process import ChildProcess
from benchmarks.processes.run_processes import MARK, RunProcesses

ROOT = Path(__file__).parents[3]
# A GPU machine may have d1's source folders without the installed `d1` command.
_D1 = (sys.executable, "-c", "from deploy.cli import main; main()")
_FAREWELL_S = 20.0


class Started:
    """A running command."""

    def __init__(self, visit: Visit, child: ChildProcess, processes: RunProcesses, memory: MemoryWatch) -> None:
        self._visit, self._child = visit, child
        self.processes = processes
        """The command's process and its descendants."""
        self.memory = memory
        """Memory of these processes."""

    @property
    def printed(self) -> str:
        """Return the output so far."""
        return "\n".join(line.text for line in self._child.lines)

    def wait_until(self, is_so: Callable[[], bool], what: str) -> float:
        """Wait for a condition and return the seconds. Raises StageError if the command or the time ends first."""

        def is_there() -> bool:
            if is_so():
                return True
            if self._child.status is not None:
                raise StageError(self._last_words())
            return False

        return self._visit.wait_until(is_there, what)

    def finish(self) -> None:
        """Wait for the command to end. Raises StageError if it fails."""
        self._visit.wait_until(lambda: self._child.status is not None, "the command's end")
        if self._child.status:
            raise StageError(self._last_words())

    def interrupt(self) -> None:
        """Send Ctrl-C and wait for the command to end."""
        self._child.signal(signal.SIGINT)
        self._visit.wait_until(lambda: self._child.status is not None, "the command's end after Ctrl-C")

    def _last_words(self) -> str:
        self._child.close()
        said = [line for line in self.printed.splitlines() if line.strip()]
        return said[-1].strip() if said else f"it ended with {self._child.status} and said nothing"


@contextmanager
def started(visit: Visit, *words: str) -> Iterator[Started]:
    """Run `d1 WORDS` during the block, then stop all of its processes."""
    mark = secrets.token_hex(8)
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "D1_REDIS_URL")}
    environment[MARK] = mark
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    processes = RunProcesses(mark)
    child = ChildProcess((*_D1, *words), environment)
    memory = MemoryWatch(processes, visit.device)
    try:
        yield Started(visit, child, processes, memory)
    finally:
        memory.end()
        child.signal(signal.SIGINT)
        until = time.monotonic() + _FAREWELL_S
        while child.status is None and time.monotonic() < until:
            time.sleep(0.1)
        processes.kill()
        child.kill()
        child.close()


def carried_out(visit: Visit, *words: str) -> Started:
    """Run `d1 WORDS` to its end. Raises StageError if it fails."""
    with started(visit, *words) as command:
        command.finish()
    return command
