"""A child process that answers lines, within limits, and is killed where it does not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MAX_REPLY_BYTES = 4096
# Killing takes milliseconds; after this the zygote itself is given up.
_KILL_S = 5.0
# What is killed may have to wait for a CPU to end on.
_REAP_S = 60.0
# A socket with a timeout of 0 does not wait at all, and raises something else.
_SHORTEST_S = 1e-3


class WorkerEndedError(Exception):
    """The worker ended instead of answering. `args` has the signal that ended it, 0 for none that is known."""


class NotStartedError(Exception):
    """The zygote did not come up."""


class KillableWorker:
    """One worker at a time, forked by a zygote; see `zygote.py` for what they say to each other.

    The zygote ends when its socket does, and so with this process, however that ends; the worker ends with the zygote.
    (A signal at the parent's death would not do for the zygote: it comes when the thread ends that started it.)
    """

    def __init__(self, script: Path, arguments: Sequence[str], *, start_s: float, wall_s: float) -> None:
        self._script, self._arguments = script, arguments
        self._start_s, self._wall_s = start_s, wall_s
        self._processes = _Processes()
        # At exit, too, and when nobody has this object any more.
        self._at_the_end = weakref.finalize(self, self._processes.end)

    def ask(self, request: bytes) -> bytes:
        """The worker's line for ours; both end in a line end.

        Raises TimeoutError after `wall_s`, WorkerEndedError, and NotStartedError. The next request has a new worker.
        """
        worker = self._processes.worker or self._fork()
        try:
            reply = _exchange(worker, request, time.monotonic() + self._wall_s)
        except ConnectionError:
            reply = b""
        except BaseException:
            # Whatever it was: a reply that comes late must not be taken for the one to the next request.
            self.end_worker()
            raise
        if not reply.endswith(b"\n"):
            raise WorkerEndedError(self.end_worker())
        return reply

    def end_worker(self) -> int:
        """Kill the worker, if there is one. Returns the signal that ended it, now or before; 0 where none is known."""
        return self._processes.end_worker()

    def close(self) -> None:
        """End both processes, within seconds. The next request starts them again."""
        self._processes.end()

    def _fork(self) -> socket.socket:
        control = self._processes.control or self._start()
        ours, theirs = socket.socketpair()
        self._processes.worker = ours
        try:
            socket.send_fds(control, [b"w"], [theirs.fileno()])
        except OSError as error:
            self.close()
            raise NotStartedError("the zygote has ended") from error
        finally:
            theirs.close()
        return ours

    def _start(self) -> socket.socket:
        control, theirs = socket.socketpair()
        # Sets are ordered by hashes: with a seed a verdict cannot hang on the process.
        zygote = subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, "-P", str(self._script), str(theirs.fileno()), *self._arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            # Ctrl-C is for this process; it ends the others when it is done with them.
            start_new_session=True,
        )
        theirs.close()
        self._processes.zygote, self._processes.control = zygote, control
        control.settimeout(self._start_s)
        try:
            is_ready = bool(control.recv(1))
        except TimeoutError as error:
            self.close()
            raise NotStartedError(f"Math-Verify did not start within {self._start_s:g} s") from error
        if not is_ready:
            self.close()
            raise NotStartedError(f"Math-Verify cannot be imported (exit status {zygote.returncode})")
        control.settimeout(_KILL_S)
        return control


@dataclass(slots=True)
class _Processes:
    """What has to be ended. Apart from the class above, so that it is still there when that is forgotten."""

    zygote: subprocess.Popen[bytes] | None = None
    control: socket.socket | None = None
    worker: socket.socket | None = None

    def end_worker(self) -> int:
        if self.worker is not None:
            self.worker.close()
        self.worker = None
        if self.control is None:
            return 0
        try:
            self.control.sendall(b"k")
            return int(self.control.recv(16) or b"0")
        except OSError:
            self.end()
            return 0

    def end(self) -> None:
        for end in (self.worker, self.control):
            if end is not None:
                end.close()
        if self.zygote is not None:
            try:
                self.zygote.wait(_KILL_S)
            except subprocess.TimeoutExpired:
                self.zygote.kill()
                self.zygote.wait(_REAP_S)
        self.zygote = self.control = self.worker = None


def _exchange(worker: socket.socket, request: bytes, deadline: float) -> bytes:
    """What a worker says to a request: up to a line end, or to its own end. Raises TimeoutError, ConnectionError."""
    worker.settimeout(max(deadline - time.monotonic(), _SHORTEST_S))
    worker.sendall(request)
    reply = b""
    while not reply.endswith(b"\n") and len(reply) < _MAX_REPLY_BYTES:
        worker.settimeout(max(deadline - time.monotonic(), _SHORTEST_S))
        piece = worker.recv(_MAX_REPLY_BYTES)
        if not piece:
            break
        reply += piece
    return reply
