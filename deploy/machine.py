"""What this machine has. A container has what its cgroup allows, as Ray counts too."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from deploy.errors import reason

_CGROUP = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, never written to
"""Where Linux keeps memory that processes share."""


def num_cpus() -> int:
    """Logical CPUs."""
    count = os.cpu_count() or 1
    quota, _, period = _cgroup_value("cpu.max").partition(" ")
    return max(1, min(count, int(quota) // int(period))) if quota.isdigit() and period.isdigit() else count


def memory_bytes() -> int:
    """Main memory."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _cgroup_value("memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def shared_memory_bytes() -> int | None:
    """Size of /dev/shm, where Ray keeps its objects; None where the system has no such thing."""
    return shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None


def num_gpus() -> int:
    """GPUs that torch can use."""
    import torch

    return torch.cuda.device_count()


def gpu_memory_bytes() -> int | None:
    """Memory of the smallest GPU that torch can use; None where there is none."""
    import torch

    devices = range(torch.cuda.device_count())
    return min((torch.cuda.get_device_properties(device).total_memory for device in devices), default=None)


def why_not_bindable(host: str, port: int, *, shares_port: bool = False) -> str | None:
    """Why nothing can listen on an address; None when it is free, or shared by what listens (`shares_port`)."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shares_port)
        try:
            probe.bind((host, port))
        except OSError as error:
            return reason(error)
    return None


def free_bytes(path: Path) -> int:
    """Room on the disk that a path is on, or will be."""
    return shutil.disk_usage(nearest_existing(path)).free


def nearest_existing(path: Path) -> Path:
    """The path itself, or the closest of its parents, that exists; not always a directory."""
    path = path.absolute()
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def _cgroup_value(name: str) -> str:
    path = _CGROUP / name
    return path.read_text().strip() if path.is_file() else ""
