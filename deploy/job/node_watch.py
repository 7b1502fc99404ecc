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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

_CREDENTIALS = struct.Struct("3i")  # struct ucred of Linux: pid, uid, gid.
_PROBE_EVERY_S = 1.0


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


def _refuses(address: tuple[str, int]) -> bool:
    """Whether the address refuses connections. A busy or stopped process that is slow to answer does not."""
    try:
        socket.create_connection(address, timeout=_PROBE_EVERY_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def watching(processes: Mapping[str, NodeProcess], on_death: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, call `on_death` from a thread, once, with the name of the first process that dies.

    If one is dead already, it is called in this thread before the block.
    """
    with ExitStack() as at_end:
        names: dict[int, str] = {}
        dead = None
        for name, process in processes.items():
            try:
                handle = os.pidfd_open(process.pid)
            except ProcessLookupError:
                dead = name
                break
            at_end.callback(os.close, handle)
            names[handle] = name
        if dead is not None:
            on_death(dead)
            yield
            return
        wake, woken = os.pipe()
        at_end.callback(os.close, wake)
        poll = select.poll()
        for handle in (*names, wake):
            poll.register(handle, select.POLLIN)

        probed = {name: process.address for name, process in processes.items() if process.address}

        def watch() -> None:
            # A process's handle becomes readable when it ends, the pipe when the block ends.
            while not (ended := [handle for handle, _ in poll.poll(_PROBE_EVERY_S * 1000 if probed else None)]):
                if name := next((name for name, address in probed.items() if _refuses(address)), None):
                    on_death(name)
                    return
            if wake not in ended:
                on_death(names[ended[0]])

        thread = threading.Thread(target=watch, name="d1-node-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            os.close(woken)
            thread.join()
