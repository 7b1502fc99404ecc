"""Who writes a directory, a run's or an evaluation's: one process at a time.

The lock is the operating system's (flock), so it ends with the process that has it, however that ends. The file says
who that is, for the sentence that another is refused with; what it says after an end means nothing.
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

from deploy.errors import UserError, reason

LOCK = ".lock"
# `d1 runs` holds the lock for an instant to see whether somebody has it.
_NUM_TRIES, _BETWEEN_TRIES_S = 20, 0.05
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process that has a run directory's lock."""

    host: str
    """Its machine."""
    pid: int
    """Its id there."""
    began_at: float
    """When it took the lock, in Unix time."""

    @property
    def is_here(self) -> bool:
        """Whether it is of this machine."""
        return self.host == socket.gethostname()


class RunLock:
    """The lock of a directory, had from `take` to `close`."""

    def __init__(self, file: int, *, is_exclusive: bool) -> None:
        """Use `take`."""
        self._file = file
        self.is_exclusive = is_exclusive
        """Whether nobody else can have it; False on a file system without locks."""

    @classmethod
    def take(cls, directory: Path, what: str = "run") -> RunLock:
        """Take the lock of a directory, in which lies what `what` names.

        Raises UserError when another process has it, or it cannot be written to.
        """
        for _ in range(_NUM_TRIES):
            try:
                file = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise UserError(f"the {what} in {directory} cannot be written to: {reason(error)}") from error
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
        """Let others have it."""
        os.close(self._file)


def holder_of(directory: Path) -> Holder | None:
    """Who on this machine has a run directory's lock now; None where nobody has, or where that cannot be known.

    A lock of another machine need not have reached this one, nor its end.
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
    """Who had a run directory's lock last, and may have it; None where nobody has signed it."""
    try:
        return Holder(**json.loads((directory / LOCK).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _is_in_place(file: int, directory: Path) -> bool:
    """Whether what was locked is still the directory's: who was before may have taken it away."""
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
        # The lock holds without a name too, and a run that resumes may need no room.
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
