"""d1's commands as child processes: waited for, and ended with all that they started."""

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
from deploy.chaos.driver import Driver
from deploy.chaos.targets import MARK, Family

ROOT = Path(__file__).parents[3]
# A machine with a GPU may have d1's folders and no `d1`.
_D1 = (sys.executable, "-c", "from deploy.cli import main; main()")
_FAREWELL_S = 20.0


class Started:
    """A command under way."""

    def __init__(self, visit: Visit, driver: Driver, family: Family, memory: MemoryWatch) -> None:
        self._visit, self._driver = visit, driver
        self.family = family
        """Its processes."""
        self.memory = memory
        """What they take."""

    @property
    def printed(self) -> str:
        """What it has printed."""
        return "\n".join(line.text for line in self._driver.lines)

    def wait_until(self, is_so: Callable[[], bool], what: str) -> float:
        """Seconds until it is so. Raises StageError where the command ends before, or the stage's time does."""

        def is_there() -> bool:
            if is_so():
                return True
            if self._driver.status is not None:
                raise StageError(self._last_words())
            return False

        return self._visit.wait_until(is_there, what)

    def finish(self) -> None:
        """Wait for its end. Raises StageError where it fails."""
        self._visit.wait_until(lambda: self._driver.status is not None, "the command's end")
        if self._driver.status:
            raise StageError(self._last_words())

    def interrupt(self) -> None:
        """Ctrl-C, and its end."""
        self._driver.signal(signal.SIGINT)
        self._visit.wait_until(lambda: self._driver.status is not None, "the command's end after Ctrl-C")

    def _last_words(self) -> str:
        self._driver.close()
        said = [line for line in self.printed.splitlines() if line.strip()]
        return said[-1].strip() if said else f"it ended with {self._driver.status} and said nothing"


@contextmanager
def started(visit: Visit, *words: str) -> Iterator[Started]:
    """`d1 WORDS` for as long as the block lasts; then nothing of it is left."""
    mark = secrets.token_hex(8)
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "D1_REDIS_URL")}
    environment[MARK] = mark
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    family = Family(mark)
    driver = Driver((*_D1, *words), environment)
    memory = MemoryWatch(family, visit.device)
    try:
        yield Started(visit, driver, family, memory)
    finally:
        memory.end()
        driver.signal(signal.SIGINT)
        until = time.monotonic() + _FAREWELL_S
        while driver.status is None and time.monotonic() < until:
            time.sleep(0.1)
        family.kill()
        driver.kill()
        driver.close()


def carried_out(visit: Visit, *words: str) -> Started:
    """`d1 WORDS` from its beginning to its end. Raises StageError where it fails."""
    with started(visit, *words) as command:
        command.finish()
    return command
