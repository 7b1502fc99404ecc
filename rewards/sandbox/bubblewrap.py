"""Sandbox of kernel namespaces, through `bwrap` from Debian's package bubblewrap."""

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
    """Return the path of `bwrap`. Raises ValueError if it is missing or too old."""
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
    """Return whether this is the machine's real root, not that of a namespace: process limits do not apply to it."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


def uid_for(slot: int) -> int:
    """Return an otherwise unused user id, for one sandbox of this process: the process limit counts per user."""
    return _FIRST_UID + (os.getpid() << 6) + slot % 64


def command(config: SandboxConfig, python: Interpreter, seccomp_fd: int) -> list[str]:
    """Return the command that runs Python with nothing but its own files, read-only, and a private /tmp.

    As root it stays in the current user namespace, and the program switches to another user (`inside.limits`). Other
    users need a new user namespace.
    """
    users = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    if not is_root():
        users = ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    arguments = [bwrap(), *users, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    # As process 1, the program takes all other processes of its namespace with it when it ends, and bwrap waits for it.
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
    # Parent folders that bwrap creates implicitly are accessible only to root.
    for folder in sorted(
        {str(parent) for _, target in (*python.mounts, ("", "/dev/null")) for parent in _above(target)}
    ):
        arguments += ["--perms", "0755", "--dir", folder]
    for source, target in python.mounts:
        arguments += ["--ro-bind", source, target]
    for target, path in python.links:
        arguments += ["--symlink", target, path]
    # Not --dev, which adds a /dev/shm without a size limit, and not --proc, which nothing needs.
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        arguments += ["--dev-bind", device, device]
    arguments += ["--perms", "1777", "--size", str(max(config.file_bytes, 4096)), "--tmpfs", "/tmp"]  # noqa: S108
    arguments += ["--chdir", "/tmp", "--remount-ro", "/", "--seccomp", str(seccomp_fd), "--"]  # noqa: S108
    return [*arguments, *python.command]


def _above(path: str) -> tuple[Path, ...]:
    return tuple(Path(path).parents)[:-1]
