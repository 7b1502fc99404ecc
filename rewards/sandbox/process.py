"""Lifecycle of one sandboxed process: start, CPU time, and termination with all its children."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rewards.sandbox import bubblewrap, gvisor
from rewards.sandbox.config import SandboxConfig
from rewards.sandbox.interpreter import interpreter
from rewards.sandbox.syscalls import seccomp_filter

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_END_S = 10.0
_SLOTS = itertools.count()


class SandboxedProcess:
    """A sandboxed Python process that runs one role of `rewards.sandbox.inside`. Use it as a context manager."""

    def __init__(self, config: SandboxConfig, role: str, fds: tuple[int, ...], stdout: int, stdin: int) -> None:
        """Start the process. `fds` are open in it under the same numbers, which are the role's arguments after the
        limits.

        `stdin` and `stdout` are as for `subprocess.Popen`. Standard error is a pipe, for errors during the start; for
        the role `program` it is also that of the program.
        """
        self._kind = config.kind
        python = interpreter(role, confined=config.kind != "none")
        arguments = (_limits(config), *map(str, fds))
        with contextlib.ExitStack() as stack:
            keep = fds
            match config.kind:
                case "bubblewrap":
                    filter_fd = stack.enter_context(memory_file(seccomp_filter()))
                    keep = (*fds, filter_fd)
                    command = [*bubblewrap.command(config, python, filter_fd), *arguments]
                case "gvisor":
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="d1-")))
                    command = gvisor.command(folder, config, python, arguments, fds)
                case "none":
                    command = [*python.command, *arguments]
            self._process = subprocess.Popen(  # noqa: S603 - a command of ours
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.PIPE,
                pass_fds=keep,
                env=dict(python.environment),
                start_new_session=True,
            )
            # gVisor's bundle is kept until the end. The seccomp filter has been inherited.
            self._files = stack.pop_all()

    def __enter__(self) -> SandboxedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def stdout(self) -> IO[bytes]:
        """The reading end of its standard output, if that is a pipe."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def stderr(self) -> IO[bytes]:
        """The reading end of its standard error."""
        assert self._process.stderr is not None
        return self._process.stderr

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit status, 128 + n for signal n; None if it has not ended after `timeout_s`."""
        try:
            code = self._process.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            return None
        return 128 - code if code < 0 else code

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its processes so far, including those that have ended."""
        total = 0
        for pid in (self._process.pid, *_descendants(self._process.pid)):
            with contextlib.suppress(OSError):
                after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += sum(map(int, after_name[11:15]))
        return total / _TICKS_PER_S

    def end(self) -> None:
        """Kill it and all processes that it started, and wait until they are dead. Its pipes stay open."""
        if self._process.poll() is None:
            # bwrap ends after its child, process 1 of the namespace, which ends after all other processes in it.
            first = next(_children(self._process.pid), None) if self._kind == "bubblewrap" else None
            if first is not None:
                with contextlib.suppress(OSError):
                    os.kill(first, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_S)
        if self._kind != "bubblewrap":
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(_END_S)

    def close(self) -> None:
        """Close its pipes and remove its files."""
        self._files.close()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@contextlib.contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    """Yield the descriptor of an in-memory file, positioned at its start, for a process to inherit."""
    fd = os.memfd_create("d1", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def deadline(seconds: float) -> float:
    """Return the `time.monotonic` value that is `seconds` from now."""
    return time.monotonic() + seconds


def _limits(config: SandboxConfig) -> str:
    values = {
        "cpu_s": config.cpu_s,
        "memory_bytes": config.memory_bytes,
        "file_bytes": config.file_bytes,
        "files": config.num_files,
        "processes": config.num_processes,
    }
    if config.kind == "bubblewrap" and bubblewrap.is_root():
        values["uid"] = bubblewrap.uid_for(next(_SLOTS))
    return ",".join(f"{name}={value}" for name, value in values.items())


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (task / "children").read_text().split())


def _descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _descendants(child)
