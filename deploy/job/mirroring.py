"""Background mirroring of a run's checkpoints, from a thread of the driver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from actors.run_log import CHECKPOINTS, Event
from deploy.errors import first_line
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
    wanted, ended, failure = threading.Event(), threading.Event(), ""

    def push() -> None:
        nonlocal failure
        is_last = False
        while not is_last:
            wanted.wait()
            wanted.clear()
            is_last, failure = ended.is_set(), ""
            try:
                mirror.push(run_dir)
            except Exception as error:  # of whichever fsspec backend
                failure = f"the checkpoints are not copied to {mirror.url}: {type(error).__name__}: {first_line(error)}"
                on_failure(failure)

    def heard(event: Event) -> None:
        on_event(event)
        if event["event"] == "checkpoint":
            wanted.set()

    thread = threading.Thread(target=push, name="d1-mirror", daemon=True)
    thread.start()
    # Copy the initial policy.
    wanted.set()
    try:
        yield heard
    finally:
        on_event({"event": "status", "what": f"copying checkpoints to {mirror.url}"})
        ended.set()
        wanted.set()
        sizes = (path.stat().st_size for path in (run_dir / CHECKPOINTS).rglob("*") if path.is_file())
        within_s = transfer_timeout_s(_LAST_S, sum(sizes))
        thread.join(within_s)
        late = f"the checkpoints are not copied to {mirror.url} within {within_s:.0f} s"
        if why := late if thread.is_alive() else failure:
            on_event({"event": "status", "what": why})
