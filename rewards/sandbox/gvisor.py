"""Sandbox with a separate user-space kernel: gVisor's `runsc`, as an OCI bundle."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from functools import cache
from pathlib import Path
from typing import Any

from rewards.sandbox.config import SandboxConfig
from rewards.sandbox.interpreter import Interpreter


@cache
def runsc() -> str:
    """Return the path of `runsc`. Raises ValueError if it is missing."""
    path = shutil.which("runsc")
    if path is None:
        raise ValueError(
            "sandbox.kind is gvisor, and runsc is not here: install it (https://gvisor.dev/docs/user_guide/install), "
            "or say sandbox.kind: bubblewrap"
        )
    return path


def command(
    folder: Path, config: SandboxConfig, python: Interpreter, arguments: tuple[str, ...], fds: tuple[int, ...]
) -> list[str]:
    """Write a bundle into an empty folder and return the command that runs Python with `arguments` in it.

    The bundle format: https://github.com/opencontainers/runtime-spec; `runsc`'s flags: `runsc help run`.
    """
    root = folder / "rootfs"
    for path in ("tmp", "dev", *(target.lstrip("/") for _, target in python.mounts)):
        is_file = any(target == f"/{path}" and Path(source).is_file() for source, target in python.mounts)
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch() if is_file else (root / path).mkdir(exist_ok=True)
    for target, path in python.links:
        (root / path.lstrip("/")).symlink_to(target)
    (folder / "config.json").write_text(json.dumps(_bundle(config, python, arguments)))
    flags = ["--rootless", "--network=none", "--ignore-cgroups", f"--root={folder}/state"]
    passed = [f"--pass-fd={fd}:{fd}" for fd in fds]
    return [runsc(), *flags, "run", f"--bundle={folder}", *passed, f"d1-{uuid.uuid4().hex}"]


def _bundle(config: SandboxConfig, python: Interpreter, arguments: tuple[str, ...]) -> dict[str, Any]:
    mounts = [
        {"destination": target, "type": "bind", "source": source, "options": ["rbind", "ro", "nosuid"]}
        for source, target in python.mounts
    ]
    options = ["nosuid", "nodev", f"size={max(config.file_bytes, 4096)}"]
    tmp = {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": options}  # noqa: S108
    return {
        "ociVersion": "1.0.0",
        "process": {
            "args": [*python.command, *arguments],
            "env": [f"{name}={value}" for name, value in python.environment.items()],
            "cwd": "/tmp",  # noqa: S108
            "user": {"uid": 0 if os.geteuid() else 65534, "gid": 0 if os.geteuid() else 65534},
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "hostname": "sandbox",
        "mounts": [*mounts, tmp],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]},
    }
