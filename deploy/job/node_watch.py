"""Watch over the Ray processes that a driver depends on, its raylet and GCS: reports which dies first.

When its raylet or its GCS is gone, Ray's native code in the driver ends the whole process, seconds later and without
advice: no exception, `finally` or `atexit` runs. So a thread watches for the deaths themselves.

A GCS that receives SIGTERM closes its port at once and may never exit: one that refuses connections counts as dead.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from deploy.job.background import in_background

_CREDENTIALS = struct.Struct("3i")  # struct ucred of Linux: pid, uid, gid.
_POLL_S, _PROBE_TIMEOUT_S = 0.2, 1.0


@dataclass(frozen=True)
class NodeProcess:
    """A process to watch: its id, and, if it has one, the host and port where it listens while it works."""

    pid: int
    address: tuple[str, int] | None = None


def node_processes() -> dict[str, NodeProcess]:
    """Return the processes that the connected driver depends on, by display name.

    These are the raylet of its node, and the GCS if this process started it: the GCS of other clusters may restart.
    Empty if they are unknown, as in a container with its own PID namespace.
    """
    import ray

    node = ray.get_runtime_context().worker.node
    assert node is not None, "Ray is connected"
    host, port = node.gcs_address.rsplit(":", 1)
    started = {
        "Ray's raylet": ("raylet", None),
        "Ray's GCS": ("gcs_server", (host.strip("[]"), int(port))),
    }
    ours = {
        what: NodeProcess(node.all_processes[kind][0].process.pid, address)
        for what, (kind, address) in started.items()
        if kind in node.all_processes
    }
    if ours:
        return ours
    pid = _peer(node.raylet_socket_name)
    return {"Ray's raylet": NodeProcess(pid)} if pid else {}


def _peer(path: str) -> int:
    """Return the id of the process that listens on a Unix socket; 0 if it is in another PID namespace."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    return pid


@contextmanager
def watching(processes: Mapping[str, NodeProcess], on_death: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, call `on_death` from a thread, once, with the name of the first process that dies."""

    def watch(ended: threading.Event) -> None:
        while True:
            if (dead := next((name for name, process in processes.items() if _is_dead(process)), None)) is not None:
                on_death(dead)
                return
            if ended.wait(_POLL_S):
                return

    with in_background(watch, "d1-node-watch", 2 * _PROBE_TIMEOUT_S):
        yield


def _is_dead(process: NodeProcess) -> bool:
    """Whether a process has ended, or refuses connections. A stopped one that is slow to answer does neither."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        # Readable once the process has ended, also while it is a zombie.
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        if poll.poll(0):
            return True
        if process.address is not None:
            socket.create_connection(process.address, timeout=_PROBE_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False
