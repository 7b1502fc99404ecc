"""Hardware of this machine: CPUs, memory, GPUs, ports and disk; cgroup limits count, as in Ray."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from tempfile import TemporaryFile

from deploy.errors import reason

_PROBE_BYTES = 4096
_CGROUP = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, never written to
"""Linux's file system for shared memory."""


def num_cpus() -> int:
    """Return the number of logical CPUs."""
    count = os.cpu_count() or 1
    quota, _, period = _cgroup_value("cpu.max").partition(" ")
    return max(1, min(count, int(quota) // int(period))) if quota.isdigit() and period.isdigit() else count


def memory_bytes() -> int:
    """Return the bytes of main memory."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _cgroup_value("memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def shared_memory_bytes() -> int | None:
    """Return the size of /dev/shm, where Ray keeps its objects; None if the system has none."""
    return shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None


def num_gpus() -> int:
    """Return the number of GPUs that torch can use."""
    import torch

    return torch.cuda.device_count()


def gpu_memory_bytes() -> int | None:
    """Return the memory of the smallest GPU that torch can use; None if there is none."""
    import torch

    devices = range(torch.cuda.device_count())
    return min((torch.cuda.get_device_properties(device).total_memory for device in devices), default=None)


def why_not_bindable(host: str, port: int) -> str | None:
    """Explain why an address cannot be bound; None if it is free."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return reason(error)
    return None


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of a path, which need not exist yet."""
    return shutil.disk_usage(nearest_existing(path)).free


def nearest_existing(path: Path) -> Path:
    """Return the path itself or its closest parent that exists; not always a directory."""
    path = path.absolute()
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def why_not_creatable(directory: Path) -> str | None:
    """Explain why a directory cannot be created, or used; None if it can. Tries to write a file at the nearest parent.

    Permission bits do not bind root, nor show free space.
    """
    nearest = nearest_existing(directory)
    if not nearest.is_dir():
        return f"{nearest} is a file"
    try:
        with TemporaryFile(dir=nearest) as file:
            file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        return f"{nearest}: {reason(error)}"
    return None


def _cgroup_value(name: str) -> str:
    path = _CGROUP / name
    return path.read_text().strip() if path.is_file() else ""
