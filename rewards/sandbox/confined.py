"""One process in a sandbox: started, watched, and ended with all that it started."""

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


class Confined:
    """A Python in a sandbox that runs one role of `rewards.sandbox.inside`. To be used as a context manager."""

    def __init__(self, config: SandboxConfig, role: str, fds: tuple[int, ...], stdout: int, stdin: int) -> None:
        """Start it. `fds` are open there under their own numbers, which are the role's arguments after the limits.

        `stdin` and `stdout` are as for `subprocess.Popen`; standard error is for what goes wrong while it starts.
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
            # A bundle of gVisor is there until the end; a filter has been inherited.
            self._files = stack.pop_all()

    def __enter__(self) -> Confined:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def stdout(self) -> IO[bytes]:
        """The reading end of its standard output, where that is a pipe."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def stderr(self) -> IO[bytes]:
        """The reading end of its standard error."""
        assert self._process.stderr is not None
        return self._process.stderr

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status, that of a signal n is 128 + n; None when it has not ended by then."""
        try:
            code = self._process.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            return None
        return 128 - code if code < 0 else code

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far, those that ended included."""
        total = 0
        for pid in (self._process.pid, *_descendants(self._process.pid)):
            with contextlib.suppress(OSError):
                after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += sum(map(int, after_name[11:15]))
        return total / _TICKS_PER_S

    def end(self) -> None:
        """Kill it and all that it started, and wait until they are dead. Its pipes stay open."""
        if self._process.poll() is None:
            # bwrap ends when its child has, which is process 1 of its namespace; and that ends when all others have.
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
    """The number of an open file in memory, at its beginning, for a process to inherit."""
    fd = os.memfd_create("d1", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def deadline(seconds: float) -> float:
    """The time, of `time.monotonic`, that is so many seconds from now."""
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
