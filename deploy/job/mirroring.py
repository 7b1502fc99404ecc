"""Background mirroring of a run's checkpoints, from a thread of the driver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from actors.run_log import CHECKPOINTS, Event
from deploy.runs.mirror import Mirror
from learner.parallel.timeouts import transfer_timeout_s

# Minimum timeout of the last copy; it grows with the bytes to copy.
_LAST_S = 600.0

OnEvent = Callable[[Event], None]


@contextmanager
def mirrored(
    mirror: Mirror | None, run_dir: Path, on_event: OnEvent, on_failure: Callable[[str], object]
) -> Iterator[OnEvent]:
    """Copy each checkpoint to the mirror in the background; leaving the block waits for the last copy.

    The yielded callback must receive the run's events, and passes them on to `on_event`.

    Args:
        mirror: destination; None: no copies.
        run_dir: the run directory to copy.
        on_event: receives the events, and messages about the last copy.
        on_failure: receives a message for each failed copy. The next copy makes up for it.
    """
    if mirror is None:
        yield on_event
        return
    copier = _Copier(mirror, run_dir, on_failure)

    def heard(event: Event) -> None:
        on_event(event)
        if event["event"] == "checkpoint":
            copier.wanted.set()

    # Copy the initial policy.
    copier.wanted.set()
    copier.start()
    try:
        yield heard
    finally:
        on_event({"event": "status", "what": f"copying checkpoints to {mirror.url}"})
        if why := copier.end():
            on_event({"event": "status", "what": why})


class _Copier(threading.Thread):
    """Thread that copies on request, and once more before it ends."""

    def __init__(self, mirror: Mirror, run_dir: Path, on_failure: Callable[[str], object]) -> None:
        super().__init__(name="d1-mirror", daemon=True)
        self._mirror, self._run_dir, self._on_failure = mirror, run_dir, on_failure
        self.wanted = threading.Event()
        self._must_end, self._failure = False, ""

    def run(self) -> None:
        """Copy on each request, until `end`."""
        is_last = False
        while not is_last:
            self.wanted.wait()
            self.wanted.clear()
            is_last = self._must_end
            self._failure = ""
            try:
                self._mirror.push(self._run_dir)
            except Exception as error:  # of whichever fsspec backend
                self._failure = f"the checkpoints are not copied to {self._mirror.url}: {_in_a_line(error)}"
                self._on_failure(self._failure)

    def end(self) -> str:
        """Wait for the last copy, as long as all bytes may take. Return why it failed; empty on success."""
        self._must_end = True
        self.wanted.set()
        files = [path for path in (self._run_dir / CHECKPOINTS).rglob("*") if path.is_file()]
        within_s = transfer_timeout_s(_LAST_S, sum(path.stat().st_size for path in files))
        self.join(within_s)
        if self.is_alive():
            return f"the checkpoints are not copied to {self._mirror.url} within {within_s:.0f} s"
        return self._failure


def _in_a_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
