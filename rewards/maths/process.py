"""Killable worker process for line-based requests, with time limits."""

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
# Killing takes milliseconds. After this timeout the zygote itself is considered dead.
_KILL_S = 5.0
# On a busy machine, a killed process may wait for a CPU before it exits.
_REAP_S = 60.0
# With a timeout of 0 a socket is non-blocking, and raises a different exception.
_SHORTEST_S = 1e-3


class WorkerEndedError(Exception):
    """The worker ended instead of answering. `args` has the signal that ended it, 0 if unknown."""


class WorkerStartError(Exception):
    """The zygote did not start."""


class KillableWorker:
    """One worker at a time, forked by a zygote; `zygote.py` describes the protocol.

    The zygote exits when its control socket closes, and so whenever this process ends; the worker ends with the zygote.
    (A parent-death signal would not work for the zygote: it is sent when the thread that started it ends.)
    """

    def __init__(self, script: Path, arguments: Sequence[str], *, start_timeout_s: float, timeout_s: float) -> None:
        self._script, self._arguments = script, arguments
        self._start_timeout_s, self._timeout_s = start_timeout_s, timeout_s
        self._processes = _Processes()
        # Also runs at exit, and when this object is garbage collected.
        self._at_the_end = weakref.finalize(self, self._processes.end)

    def request(self, request: bytes) -> bytes:
        """Send a request line and return the worker's reply line; both end in a line end.

        Raises TimeoutError after `timeout_s`, WorkerEndedError, and WorkerStartError. After an error the next request
        starts a new worker.
        """
        worker = self._processes.worker or self._fork()
        try:
            reply = _exchange(worker, request, time.monotonic() + self._timeout_s)
        except ConnectionError:
            reply = b""
        except BaseException:
            # After any error: a late reply must not be taken for the reply to the next request.
            self.end_worker()
            raise
        if not reply.endswith(b"\n"):
            raise WorkerEndedError(self.end_worker())
        return reply

    def end_worker(self) -> int:
        """Kill the worker, if there is one. Returns the signal that ended it, now or earlier; 0 if unknown."""
        return self._processes.end_worker()

    def close(self) -> None:
        """Stop both processes, within seconds. The next request restarts them."""
        self._processes.end()

    def _fork(self) -> socket.socket:
        control = self._processes.control or self._start()
        ours, theirs = socket.socketpair()
        self._processes.worker = ours
        try:
            socket.send_fds(control, [b"w"], [theirs.fileno()])
        except OSError as error:
            self.close()
            raise WorkerStartError("the zygote has ended") from error
        finally:
            theirs.close()
        return ours

    def _start(self) -> socket.socket:
        control, theirs = socket.socketpair()
        # The order of sets depends on hashes. A fixed seed makes verdicts independent of the process.
        zygote = subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, "-P", str(self._script), str(theirs.fileno()), *self._arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            # Only this process handles Ctrl-C, and stops the others when it has finished with them.
            start_new_session=True,
        )
        theirs.close()
        self._processes.zygote, self._processes.control = zygote, control
        control.settimeout(self._start_timeout_s)
        try:
            is_ready = bool(control.recv(1))
        except TimeoutError as error:
            self.close()
            raise WorkerStartError(f"Math-Verify did not start within {self._start_timeout_s:g} s") from error
        if not is_ready:
            self.close()
            raise WorkerStartError(f"Math-Verify cannot be imported (exit status {zygote.returncode})")
        control.settimeout(_KILL_S)
        return control


@dataclass(slots=True)
class _Processes:
    """Processes and sockets to close. Separate from `KillableWorker`, so that the finalizer does not keep that
    alive."""

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
    """Send a request and return the reply, up to a line end or the end of the stream. Raises TimeoutError,
    ConnectionError."""
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
