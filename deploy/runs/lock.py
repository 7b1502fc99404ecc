"""Exclusive lock of a run or evaluation directory: one writing process at a time.

It is an OS lock (flock), so it is released however its process ends. The lock file names the holder, for the message to
a process that is refused. Its content alone does not mean that the lock is held.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from deploy.errors import UserError, os_errors

LOCK = ".lock"
# `d1 runs` takes the lock for an instant to probe for a holder, so one refusal is not conclusive.
_NUM_TRIES, _BETWEEN_TRIES_S = 20, 0.05
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process that holds a run directory's lock."""

    host: str
    """Its hostname."""
    pid: int
    """Its process id on that host."""
    began_at: float
    """When it took the lock, in Unix time."""

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        return self.host == socket.gethostname()


class RunLock:
    """Exclusive lock of a directory, held from `take` to `close`."""

    def __init__(self, file: int, *, is_exclusive: bool) -> None:
        """Use `take`."""
        self._file = file
        self.is_exclusive = is_exclusive
        """Whether no other process can hold it; False on a file system without locks."""

    @classmethod
    def take(cls, directory: Path, what: str = "run") -> RunLock:
        """Take the lock of a directory; `what` names its content in error messages.

        Raises UserError if another process holds it, or the directory is not writable.
        """
        for _ in range(_NUM_TRIES):
            with os_errors(f"the {what} in {directory} cannot be written to"):
                file = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return cls(file, is_exclusive=False)
                os.close(file)
                raise
            else:
                if _is_in_place(file, directory):
                    _sign(file)
                    return cls(file, is_exclusive=True)
                os.close(file)
            time.sleep(_BETWEEN_TRIES_S)
        raise UserError(_refusal(directory, what))

    def close(self) -> None:
        """Release the lock."""
        os.close(self._file)


def holder_of(directory: Path) -> Holder | None:
    """Return the process on this machine that holds a run directory's lock; None if there is none, or it is unknown.

    A lock held on another machine may be invisible here, as may its release.
    """
    try:
        file = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = last_holder_of(directory)
        return holder if holder is not None and holder.is_here else None
    except OSError:
        return None
    finally:
        os.close(file)
    return None


def last_holder_of(directory: Path) -> Holder | None:
    """Return the last process that signed a run directory's lock, which may still hold it; None if it is unsigned."""
    try:
        return Holder(**json.loads((directory / LOCK).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _is_in_place(file: int, directory: Path) -> bool:
    """Whether the locked file is still the directory's lock file: the previous holder may have moved or removed it."""
    try:
        return os.path.samestat(os.fstat(file), (directory / LOCK).stat())
    except FileNotFoundError:
        return False


def _sign(file: int) -> None:
    holder = Holder(host=socket.gethostname(), pid=os.getpid(), began_at=time.time())
    try:
        os.truncate(file, 0)
        os.pwrite(file, json.dumps(asdict(holder)).encode(), 0)
    except OSError as error:
        # The lock works unsigned too, and a resumed run may need no disk space.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _refusal(directory: Path, what: str) -> str:
    holder = last_holder_of(directory)
    if holder is None:
        return f"another process writes the {what} in {directory}; wait until it has ended, or stop it"
    began = datetime.fromtimestamp(holder.began_at, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return (
        f"process {holder.pid} on {holder.host} writes the {what} in {directory} since {began}; "
        f"wait until it has ended, or stop it: kill {holder.pid}"
    )
