"""A sandbox of the kernel's namespaces, through `bwrap` of Debian's package bubblewrap."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from rewards.sandbox.config import SandboxConfig
from rewards.sandbox.interpreter import Interpreter

_OLDEST = (0, 8, 0)  # the first with --size
_FIRST_UID = 0x70000000


@cache
def bwrap() -> str:
    """Where `bwrap` is. Raises ValueError, in one sentence, where it is missing or too old."""
    path = shutil.which("bwrap")
    advice = "install it (on Debian or Ubuntu: apt install bubblewrap), or say sandbox.kind: none to run without one"
    if path is None:
        raise ValueError(f"code is graded in a sandbox, and bubblewrap is not here: {advice}")
    asked = [path, "--version"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False).stdout  # noqa: S603 - found above
    version = tuple(map(int, re.findall(r"\d+", said)[:3]))
    if version < _OLDEST:
        raise ValueError(f"bubblewrap here is {said.strip()!r}, and 0.8.0 is the oldest that limits /tmp: {advice}")
    return path


def is_root() -> bool:
    """Whether this is the machine's own root, for whom limits on processes do not hold, not a namespace's."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


def uid_for(slot: int) -> int:
    """A user that nobody is, for one sandbox of this process: the limit on processes counts those of a user."""
    return _FIRST_UID + (os.getpid() << 6) + slot % 64


def command(config: SandboxConfig, python: Interpreter, seccomp_fd: int) -> list[str]:
    """The command that runs a Python with nothing but its own files, read-only, and a private /tmp.

    Root stays in the user namespace that it is in, and the program gives itself another user (`inside.limits`); anyone
    else needs a user namespace of its own.
    """
    users = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    if not is_root():
        users = ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    arguments = [bwrap(), *users, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    # As process 1, the program's end is that of all others in its namespace, and bwrap waits for it.
    arguments += [
        "--unshare-cgroup-try",
        "--as-pid-1",
        "--die-with-parent",
        "--new-session",
        "--hostname",
        "sandbox",
        "--clearenv",
    ]
    for name, value in python.environment.items():
        arguments += ["--setenv", name, value]
    # Folders that bwrap makes by itself are closed to all but root.
    for folder in sorted(
        {str(parent) for _, target in (*python.binds, ("", "/dev/null")) for parent in _above(target)}
    ):
        arguments += ["--perms", "0755", "--dir", folder]
    for source, target in python.binds:
        arguments += ["--ro-bind", source, target]
    for target, path in python.links:
        arguments += ["--symlink", target, path]
    # Not --dev and not --proc: the first brings a /dev/shm without a limit, and nothing needs the second.
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        arguments += ["--dev-bind", device, device]
    arguments += ["--perms", "1777", "--size", str(max(config.file_bytes, 4096)), "--tmpfs", "/tmp"]  # noqa: S108
    arguments += ["--chdir", "/tmp", "--remount-ro", "/", "--seccomp", str(seccomp_fd), "--"]  # noqa: S108
    return [*arguments, *python.command]


def _above(path: str) -> tuple[Path, ...]:
    return tuple(Path(path).parents)[:-1]
