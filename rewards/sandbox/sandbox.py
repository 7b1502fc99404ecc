"""Hostile programs run, and judged by tests that they cannot reach.

A program is judged by two processes, each in a sandbox of its own. One has the program and no test. The other has the
tests and no line of the program: it asks the first for what the program's functions return, over a socket, compares by
itself, and reports to us through a pipe that the first does not have. So there is nothing to forge: `sys.exit(0)`,
`os._exit(0)`, closed or faked output, hooks at exit, threads that live on, replaced builtins and a search through all
frames happen where no verdict is made, and end as failed tests.

Not defended:

- A program that works out from the arguments of a call that it is being tested (they are all that it sees).
- Objects of the program's own classes, where tests ask for them (`len(stack)`, `x in tree`, `a == b` of two of them):
  they answer as they like. Comparisons and sums with plain data are decided by the tests' side, and
  `Suite.plain_only` refuses such objects altogether.
- Bugs of the kernel. `gvisor` puts one more kernel between.
- Memory in total: each process of `num_processes` may use `memory_bytes`. File names in /tmp, not only bytes, take
  kernel memory, for as long as the CPU seconds last.
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
from rewards.sandbox.confined import Confined, deadline, memory_file
from rewards.sandbox.inside import wire
from rewards.sandbox.suite import Suite, SuiteVerdict

_GRACE_S = 3.0
_PROBE_S = 60.0
_KILLED = 128 + 9
_LONGEST_COMPLAINT = 300
_OVERLOADED = "the seconds by the clock ran out while the program had hardly any of the processor"


class ProgramEnding(StrEnum):
    """How a run of a program ended."""

    FINISHED = "finished"
    """By itself, with an exit status."""
    WALL_LIMIT = "wall_limit"
    CPU_LIMIT = "cpu_limit"
    """The kernel killed it, as it does at the CPU limit. (And where the whole machine is out of memory.)"""
    OUTPUT_LIMIT = "output_limit"
    """It wrote more than `output_bytes` to standard output and error."""
    NOT_STARTED = "not_started"
    """The sandbox did not come up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """What came of a program."""

    stdout: bytes
    """What it wrote to standard output."""
    exit_status: int | None
    """As a shell gives it, 128 + n for signal n; None if we killed it."""
    ending: ProgramEnding
    """How it ended."""
    seconds: float
    """By the clock, the sandbox's start included."""
    complaint: str
    """The last line of standard error."""


class Sandbox:
    """Runs programs, each in a sandbox of its own that is gone with all its processes and files when a call returns."""

    def __init__(self, config: SandboxConfig) -> None:
        """Raises ValueError, in one sentence, where the config's kind of sandbox does not work on this machine."""
        self._config = config
        match config.kind:
            case "bubblewrap":
                bubblewrap.bwrap()
            case "gvisor":
                gvisor.runsc()
            case "none":
                return
        # As long as it takes: a busy machine is no reason to refuse.
        probe = _run(config.model_copy(update={"wall_s": _PROBE_S}), "print('up')", b"")
        if probe.stdout != b"up\n":
            raise ValueError(
                f"the sandbox {config.kind} does not start here ({probe.complaint or probe.ending}): it needs user "
                "namespaces, or root with the right to mount; sandbox.kind: none runs code without one"
            )

    def run(self, program: str, stdin: bytes = b"") -> Ran:
        """Run a program as `__main__`; it takes `wall_s` and some seconds at most."""
        return _run(self._config, program, stdin)

    def judge(self, program: str, suite: Suite) -> SuiteVerdict:
        """What the tests say of a program; it takes `wall_s` and some seconds at most.

        A program that uses up CPU seconds, memory or processes fails its tests. Where the seconds by the clock run out
        and it used less than half of its CPU seconds, the outcome is a timeout; where a sandbox does not start, or the
        tests cannot run whatever the program is, an error.
        """
        ours, theirs = socket.socketpair()
        source, tests = program.encode(errors="replace"), wire.encode(asdict(suite))
        with ours, theirs, memory_file(source) as program_fd, memory_file(tests) as suite_fd:
            candidate = Confined(
                self._config, "candidate", (program_fd, theirs.fileno()), subprocess.DEVNULL, subprocess.DEVNULL
            )
            with contextlib.closing(candidate), candidate:
                judge = Confined(self._config, "judge", (suite_fd, ours.fileno()), subprocess.PIPE, subprocess.DEVNULL)
                with contextlib.closing(judge), judge:
                    # Only the two of them hold the ends: each sees when the other is gone.
                    ours.close()
                    theirs.close()
                    return self._await(candidate, judge, suite)

    def _await(self, candidate: Confined, judge: Confined, suite: Suite) -> SuiteVerdict:
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
                # Tests that the dataset's own solution passes end by themselves: what they were given is the reason.
                return SuiteVerdict(
                    passed=none, outcome=Outcome.GRADED, detail="the tests did not end on what it returned"
                )
        candidate.end()
        judge.end()
        said = {process.stderr.fileno(): bytearray() for process in (candidate, judge)}
        _read(said, 65_536, deadline(_GRACE_S))
        why = next(filter(None, map(_last_line, map(bytes, said.values()))), "it said nothing")
        return SuiteVerdict(passed=none, outcome=Outcome.ERROR, detail=f"the sandbox did not start: {why}")

    def _explained(self, candidate: Confined, detail: str) -> str:
        """A detail with the limit that ended the program, if one did."""
        if "the program ended" in detail and candidate.wait(_GRACE_S) == _KILLED:
            return f"{detail}: it used up its {self._config.cpu_s} CPU seconds"
        return detail


def _run(config: SandboxConfig, program: str, stdin: bytes) -> Ran:
    began, end = time.monotonic(), deadline(config.wall_s)
    with (
        memory_file(program.encode(errors="replace")) as source,
        memory_file(stdin) as given,
        _pipe() as (up, upper),
    ):
        confined = Confined(config, "program", (source, upper), stdout=subprocess.PIPE, stdin=given)
        with contextlib.closing(confined), confined:
            os.close(upper)
            said = {confined.stdout.fileno(): bytearray(), confined.stderr.fileno(): bytearray()}
            within = _read(said, config.output_bytes, end)
            status = confined.wait(end - time.monotonic()) if within else None
            over_time = time.monotonic() >= end
            confined.end()
            started = os.read(up, 1) == b"1"
    stdout, stderr = said.values()
    return Ran(
        stdout=bytes(stdout),
        exit_status=status,
        ending=_ending(started, status, over_time),
        seconds=time.monotonic() - began,
        complaint=_last_line(bytes(stderr)),
    )


class _Messages:
    """Messages of a pipe, waited for no longer than said."""

    def __init__(self, fd: int) -> None:
        self._fd, self._buffer = fd, b""

    def next(self, end: float) -> tuple[Any, ...] | None:
        """The next one; None when the time is up, the pipe ends, or it is no message."""
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


def _ending(started: bool, status: int | None, over_time: bool) -> ProgramEnding:
    if not started:
        return ProgramEnding.NOT_STARTED
    if status is None:
        return ProgramEnding.WALL_LIMIT if over_time else ProgramEnding.OUTPUT_LIMIT
    return ProgramEnding.CPU_LIMIT if status == _KILLED else ProgramEnding.FINISHED


def _read(said: dict[int, bytearray], limit: int, end: float) -> bool:
    """Read pipes until all have ended; false where they gave more than a limit, or the time is up first."""
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
    return text.decode(errors="replace").strip().rpartition("\n")[2][:_LONGEST_COMPLAINT]


def _readable(fds: Iterable[int], end: float) -> list[int]:
    with selectors.DefaultSelector() as selector:
        for fd in fds:
            selector.register(fd, selectors.EVENT_READ)
        return [key.fd for key, _ in selector.select(max(end - time.monotonic(), 0.0))]


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """A pipe's two ends; the writing one is closed by who uses it."""
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(reading)
