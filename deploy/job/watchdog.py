"""Watchdog process of a run's driver: if the driver is killed, it says how to resume and cleans up.

Ray's native code ends a process whose raylet dies, and the kernel kills one that takes too much memory. No exception,
`finally` or thread runs then. Without the watchdog the user would read nothing, and the driver's processes would stay.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from actors.run_log import DRIVER_LOG, Event, append_event, is_done, read_events
from deploy.job.ray_output import descriptor_of
from deploy.orphans import kill_marked
from deploy.printing import printable
from deploy.program import program

_MARK = "D1_DRIVER"
_SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def watchdog(run_dir: Path, name: str) -> Iterator[None]:
    """If this process dies in the block, report that on its stderr and kill the processes that it started there.

    Args:
        run_dir: the run's directory; the failure is appended to its log.
        name: the run's name.
    """
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    handle = os.pidfd_open(os.getpid())
    words = [sys.executable, "-m", __name__, str(handle), mark, str(run_dir), name]
    # It may differ from fd 2, which is inherited if Python's own exists in memory only.
    stderr = None if descriptor_of(sys.stderr) is None else sys.stderr
    # In a separate session, so that Ctrl-C reaches only the driver. Started before the mark is set, so it has no mark.
    dog = subprocess.Popen(  # noqa: S603 - this module
        words, stdin=subprocess.DEVNULL, stderr=stderr, pass_fds=[handle], start_new_session=True
    )
    os.environ[_MARK] = mark
    # Without this Ray's processes overwrite their environment, and the mark in it, with their titles.
    os.environ.setdefault("SPT_NOENV", "1")
    try:
        yield
    finally:
        del os.environ[_MARK]
        dog.kill()
        dog.wait()
        os.close(handle)


def failure_message(run_dir: Path, name: str, what: str, more: str, known: Sequence[Event] = ()) -> str:
    """Format the message for a failed run without a coordinator, and log the failure unless the run is done.

    Args:
        run_dir: the run's directory.
        name: the run's name.
        what: what happened.
        more: where to read about it.
        known: events that may have it already.
    """
    if is_done(read_events(run_dir)):
        return f"{what}, and the service with it; the run had finished; {program()} serve {name} serves it again"
    if not any(event["event"] == "failure" and what in event["what"] for event in known):
        # The message must be shown even if the disk is full.
        with suppress(OSError):
            append_event(run_dir, "failure", what=what, attempt=1)
    return f"the run failed: {what}; {more}; --resume goes on from the newest checkpoint"


def main() -> None:
    """Wait for the driver to die, then report and clean up. A driver that ends normally kills this process first."""
    handle, mark, run_dir, name = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    # A signal that ends a whole service also ends the driver, and this process must outlive it.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()
    kill_marked(_MARK, mark)
    more = f"Ray's output is in {run_dir / DRIVER_LOG}"
    sentence = failure_message(run_dir, name, "its driver was killed, or ended by native code", more)
    cursor = _SHOW_CURSOR if sys.stderr.isatty() else ""
    sys.stderr.write(f"{cursor}d1: {printable(sentence)}\n")


if __name__ == "__main__":
    main()
