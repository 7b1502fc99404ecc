"""Runs untrusted programs and grades them by tests that they cannot access.

A program is graded by two processes, each in its own sandbox. One has the program and no test. The other has the tests
and none of the program's code: it calls the program's functions over a socket, compares the results itself, and reports
to us through a pipe that the first does not have. So there is nothing to forge: `sys.exit(0)`, `os._exit(0)`, closed or
faked output, exit hooks, surviving threads, replaced builtins and searches through all frames happen where no verdict
is made, and end as failed tests.

Not defended:

- A program that detects from the arguments of a call that it is being tested (they are all that it sees).
- Objects of the program's own classes, if tests use them (`len(stack)`, `x in tree`, `a == b` of two of them): they can
  return anything. Comparisons and sums with plain data are decided by the tests' side, and `Suite.plain_only` rejects
  such objects altogether.
- Kernel bugs. `gvisor` adds a second kernel as a barrier.
- Total memory: each process of `num_processes` may use `memory_bytes`. File names in /tmp, not only bytes, take kernel
  memory, for as long as the CPU seconds last.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rewards.problem import Outcome
from rewards.sandbox import bubblewrap, gvisor
from rewards.sandbox.config import SandboxConfig
from rewards.sandbox.inside import wire
from rewards.sandbox.process import SandboxedProcess, deadline, memory_file
from rewards.sandbox.suite import Suite, SuiteVerdict

_GRACE_S = 3.0
_PROBE_S = 60.0
_KILLED = 128 + 9
_MAX_ERROR_LINE = 300
_OVERLOADED = "the seconds by the clock ran out while the program had hardly any of the processor"


class ExitReason(StrEnum):
    """How a run of a program ended."""

    FINISHED = "finished"
    """It exited by itself."""
    WALL_LIMIT = "wall_limit"
    CPU_LIMIT = "cpu_limit"
    """The kernel killed it, as it does at the CPU limit (or if the machine is out of memory)."""
    OUTPUT_LIMIT = "output_limit"
    """It wrote more than `output_bytes` to standard output and error."""
    NOT_STARTED = "not_started"
    """The sandbox did not start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Result of running a program."""

    stdout: bytes
    """Its standard output."""
    exit_status: int | None
    """As a shell reports it, 128 + n for signal n; None if we killed it."""
    exit_reason: ExitReason
    """How it ended."""
    seconds: float
    """Wall-clock seconds, including the start of the sandbox."""
    last_error_line: str
    """The last line of standard error."""


class Sandbox:
    """Runs programs, each in a fresh sandbox, whose processes and files are gone when a call returns."""

    def __init__(self, config: SandboxConfig) -> None:
        """Check that the sandbox starts. Raises ValueError if its kind does not work on this machine."""
        self._config = config
        match config.kind:
            case "bubblewrap":
                bubblewrap.bwrap()
            case "gvisor":
                gvisor.runsc()
            case "none":
                return
        # A generous timeout, because a busy machine is no reason to refuse.
        probe = _run(config.model_copy(update={"wall_s": _PROBE_S}), "print('up')", b"")
        if probe.stdout != b"up\n":
            raise ValueError(
                f"the sandbox {config.kind} does not start here ({probe.last_error_line or probe.exit_reason}): it "
                "needs user namespaces, or root with the right to mount; sandbox.kind: none runs code without one"
            )

    def run(self, program: str, stdin: bytes = b"") -> RunResult:
        """Run a program as `__main__`. Takes at most `wall_s` plus a few seconds."""
        return _run(self._config, program, stdin)

    def judge(self, program: str, suite: Suite) -> SuiteVerdict:
        """Return the tests' verdict on a program. Takes at most `wall_s` plus a few seconds.

        A program that exceeds its CPU seconds, memory or processes fails its tests. If the wall-clock time runs out
        before either process used half of its CPU seconds, the outcome is a timeout. If a sandbox does not start, or
        the tests cannot run whatever the program is, it is an error.
        """
        ours, theirs = socket.socketpair()
        source, tests = program.encode(errors="replace"), wire.encode(asdict(suite))
        with ours, theirs, memory_file(source) as program_fd, memory_file(tests) as suite_fd:
            candidate = SandboxedProcess(
                self._config, "candidate", (program_fd, theirs.fileno()), subprocess.DEVNULL, subprocess.DEVNULL
            )
            with contextlib.closing(candidate), candidate:
                judge = SandboxedProcess(
                    self._config, "judge", (suite_fd, ours.fileno()), subprocess.PIPE, subprocess.DEVNULL
                )
                with contextlib.closing(judge), judge:
                    # Only these two processes hold the ends, so each notices when the other ends.
                    ours.close()
                    theirs.close()
                    return self._await(candidate, judge, suite)

    def _await(self, candidate: SandboxedProcess, judge: SandboxedProcess, suite: Suite) -> SuiteVerdict:
        end, messages = deadline(self._config.wall_s), _Messages(judge.stdout.fileno())
        none = (False,) * len(suite.tests)
        started = messages.next(end) == ("started",)
        reply = messages.next(end) if started else None
        late = reply is None and time.monotonic() >= end
        starved = False
        if late:
            used = candidate.cpu_s(), judge.cpu_s()
            starved = max(used) < self._config.cpu_s / 2
            candidate.end()
            started = started or messages.next(deadline(_GRACE_S)) == ("started",)
            reply = messages.next(deadline(_GRACE_S))
        match reply:
            case _ if starved:
                return SuiteVerdict(passed=none, outcome=Outcome.TIMEOUT, detail=_OVERLOADED)
            case ("judged", str(outcome), tuple(passed), str(detail)) if len(passed) == len(none):
                return SuiteVerdict(passed=passed, outcome=Outcome(outcome), detail=self._explained(candidate, detail))
            case _ if started:
                # Tests end by themselves on the reference solution, so the program's results are the cause.
                return SuiteVerdict(
                    passed=none, outcome=Outcome.GRADED, detail="the tests did not end on what it returned"
                )
        candidate.end()
        judge.end()
        said = {process.stderr.fileno(): bytearray() for process in (candidate, judge)}
        _read(said, 65_536, deadline(_GRACE_S))
        why = next(filter(None, map(_last_line, map(bytes, said.values()))), "it said nothing")
        return SuiteVerdict(passed=none, outcome=Outcome.ERROR, detail=f"the sandbox did not start: {why}")

    def _explained(self, candidate: SandboxedProcess, detail: str) -> str:
        """Return a detail with the limit that killed the program, if one did."""
        if "the program ended" in detail and candidate.wait(_GRACE_S) == _KILLED:
            return f"{detail}: it used up its {self._config.cpu_s} CPU seconds"
        return detail


def _run(config: SandboxConfig, program: str, stdin: bytes) -> RunResult:
    began, end = time.monotonic(), deadline(config.wall_s)
    with (
        memory_file(program.encode(errors="replace")) as source,
        memory_file(stdin) as given,
        _pipe() as (up, upper),
    ):
        confined = SandboxedProcess(config, "program", (source, upper), stdout=subprocess.PIPE, stdin=given)
        with contextlib.closing(confined), confined:
            os.close(upper)
            said = {confined.stdout.fileno(): bytearray(), confined.stderr.fileno(): bytearray()}
            within = _read(said, config.output_bytes, end)
            status = confined.wait(end - time.monotonic()) if within else None
            over_time = time.monotonic() >= end
            confined.end()
            started = os.read(up, 1) == b"1"
    stdout, stderr = said.values()
    return RunResult(
        stdout=bytes(stdout),
        exit_status=status,
        exit_reason=_exit_reason(started, status, over_time),
        seconds=time.monotonic() - began,
        last_error_line=_last_line(bytes(stderr)),
    )


class _Messages:
    """Reader of messages from a pipe, with a deadline."""

    def __init__(self, fd: int) -> None:
        self._fd, self._buffer = fd, b""

    def next(self, end: float) -> tuple[Any, ...] | None:
        """Return the next message, () if it is invalid; None at the deadline, at the end of the pipe, or if it is too
        long."""
        while (message := self._taken()) is None:
            if not _readable([self._fd], end):
                return None
            part = os.read(self._fd, 65_536)
            self._buffer += part
            if not part or len(self._buffer) > wire.MAX_BYTES:
                return None
        return message

    def _taken(self) -> tuple[Any, ...] | None:
        size = int.from_bytes(self._buffer[:4], "big")
        if len(self._buffer) < 4 or len(self._buffer) < 4 + size:
            return None
        content, self._buffer = self._buffer[4 : 4 + size], self._buffer[4 + size :]
        try:
            message = wire.decode(content)
        except ValueError:
            return ()
        return message if isinstance(message, tuple) else ()


def _exit_reason(started: bool, status: int | None, over_time: bool) -> ExitReason:
    if not started:
        return ExitReason.NOT_STARTED
    if status is None:
        return ExitReason.WALL_LIMIT if over_time else ExitReason.OUTPUT_LIMIT
    return ExitReason.CPU_LIMIT if status == _KILLED else ExitReason.FINISHED


def _read(said: dict[int, bytearray], limit: int, end: float) -> bool:
    """Read pipes until all have ended. Returns False if they exceed the limit, or the deadline comes first."""
    left, open_fds = limit, set(said)
    while open_fds:
        ready = _readable(open_fds, end)
        for fd in ready:
            part = os.read(fd, 65_536)
            said[fd] += part[:left]
            if not part:
                open_fds.discard(fd)
            if len(part) > left:
                return False
            left -= len(part)
        if not ready:
            return False
    return True


def _last_line(text: bytes) -> str:
    return text.decode(errors="replace").strip().rpartition("\n")[2][:_MAX_ERROR_LINE]


def _readable(fds: Iterable[int], end: float) -> list[int]:
    with selectors.DefaultSelector() as selector:
        for fd in fds:
            selector.register(fd, selectors.EVENT_READ)
        return [key.fd for key, _ in selector.select(max(end - time.monotonic(), 0.0))]


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """Yield both ends of a pipe; the user closes the writing end."""
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(reading)
