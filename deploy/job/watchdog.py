"""The watchdog: a small process beside a run's driver that says how to go on where the driver dies without a word.

Ray's native code ends a process whose raylet is going, and the kernel one that takes too much memory: no exception, no
`finally` and no thread comes to run then. Whoever started the run would read nothing, and what it started would stay.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from actors.run_log import DRIVER_LOG, append_event, is_done, read_events
from deploy.orphans import kill_marked
from deploy.printing import printable
from deploy.program import program

_MARK = "D1_DRIVER"
_SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def watchdog(run_dir: Path, name: str) -> Iterator[None]:
    """Have the death of this process in the block told on its standard error, and what it started there ended.

    Args:
        run_dir: the run's directory; its log gets the failure.
        name: the run's name.
    """
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    handle = os.pidfd_open(os.getpid())
    words = [sys.executable, "-m", __name__, str(handle), mark, str(run_dir), name]
    # In a session of its own: Ctrl-C is for the driver. Started before the mark is set, which it does not have.
    dog = subprocess.Popen(  # noqa: S603 - this module
        words, stdin=subprocess.DEVNULL, stderr=_stderr(), pass_fds=[handle], start_new_session=True
    )
    os.environ[_MARK] = mark
    # Ray's processes write their titles over their environment, and the mark in it, unless this is set.
    os.environ.setdefault("SPT_NOENV", "1")
    try:
        yield
    finally:
        del os.environ[_MARK]
        dog.kill()
        dog.wait()
        os.close(handle)


def last_words(run_dir: Path, name: str, what: str, more: str) -> str:
    """The sentence for a run whose driver ends on the spot, after `what`; the log of one under way has it too.

    Args:
        run_dir: the run's directory.
        name: the run's name.
        what: what happened.
        more: where to read about it.
    """
    if is_done(read_events(run_dir)):
        return f"{what}, and the service with it; the run had ended well; {program()} serve {name} serves it again"
    # The sentence is for who watches, whatever the disk has room for.
    with suppress(OSError):
        append_event(run_dir, "failure", what=what, attempt=1)
    return f"the run failed: {what}; {more}; --resume goes on from the newest checkpoint"


def _stderr() -> IO[str] | None:
    """Python's standard error, which need not be the native one; None, to inherit, where it is only in memory."""
    try:
        sys.stderr.fileno()
    except OSError:
        return None
    return sys.stderr


def main() -> None:
    """Wait for the driver to die, then speak and tidy up. A driver that ends by itself kills this process first."""
    handle, mark, run_dir, name = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    # What ends a whole service ends the driver, which may need this process after it.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()
    kill_marked(_MARK, mark)
    more = f"Ray's last words are in {run_dir / DRIVER_LOG}"
    sentence = last_words(run_dir, name, "its driver was killed, or ended by native code", more)
    cursor = _SHOW_CURSOR if sys.stderr.isatty() else ""
    sys.stderr.write(f"{cursor}d1: {printable(sentence)}\n")


if __name__ == "__main__":
    main()
