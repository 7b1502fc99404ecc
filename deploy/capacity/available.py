"""Available resources: of this machine, or of the cluster at an address."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass

from deploy import machine
from deploy.capacity.gpus import smallest_memory
from deploy.errors import UserError, first_line, reason
from deploy.program import program

# Ray's own defaults for its object store: share of main memory, share of /dev/shm but at least this, and maximum.
_OBJECT_STORE_SHARE, _SHARED_SHARE, _LEAST_SHARED, _MOST_STORE = 0.3, 0.95, 10**10, 200 * 10**9
_CONNECT_TIMEOUT_S = 5.0
_LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class ClusterMachine:
    """A machine of a cluster."""

    address: str
    """Its address."""
    object_store_bytes: int
    """Its part of Ray's object store."""
    has_gpu: bool
    """Whether Ray has GPUs there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """Resources available to a run."""

    where: str
    """Where they are, for messages: `this machine`, `the cluster at 10.0.0.1:6379`."""
    cpus: float
    """Logical CPUs."""
    gpus: int
    """GPUs."""
    memory_bytes: int
    """Main memory."""
    object_store_bytes: int
    """Ray's object store on the machine with the largest: what one process puts there is on one machine."""
    gpu_memory_bytes: int | None
    """Memory of the smallest GPU; None if there is none, or it is unknown."""
    num_machines: int
    """Number of machines."""
    machines: tuple[ClusterMachine, ...]
    """The machines of a running cluster that have CPUs, and so may get samplers; none if the run starts its own Ray."""
    is_ours: bool
    """Whether the run would start its own Ray there."""


def cluster_resources(address: str | None) -> Resources:
    """Return the resources of the running cluster at `address`, or of this machine if it is None.

    Raises UserError if nothing answers at the address.
    """
    if address is None:
        return _this_machine()
    _check_address(address)
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise UserError(f"no Ray cluster answers at RAY_ADDRESS {address}: {first_line(error)}") from error
    try:
        return resources_of(address)
    finally:
        ray.shutdown()


def resources_of(address: str | None) -> Resources:
    """Return the resources of the connected cluster, with all that its autoscaler may add; of this machine if None."""
    if address is None:
        return _this_machine()
    import ray

    from actors.machines import num_machines

    now, most = ray.cluster_resources(), _most_by_autoscaler()
    total = {name: max(now.get(name, 0.0), most.get(name, 0.0)) for name in (*now, *most)}
    memory = total.get("memory", 0) + total.get("object_store_memory", 0)
    return Resources(
        where=f"the cluster at {address}",
        cpus=total.get("CPU", 0),
        gpus=int(total.get("GPU", 0)),
        memory_bytes=int(memory),
        object_store_bytes=_largest_store(total.get("object_store_memory", 0) - now.get("object_store_memory", 0)),
        gpu_memory_bytes=smallest_memory(total),
        num_machines=num_machines(),
        machines=_machines(),
        is_ours=False,
    )


def _largest_store(to_come: float) -> int:
    """Return the largest object store of a machine. `to_come` counts as one, since its machines are unknown."""
    from actors.machines import alive_nodes

    stores = (node["Resources"].get("object_store_memory", 0) for node in alive_nodes())
    return int(max(to_come, *stores))


def _machines() -> tuple[ClusterMachine, ...]:
    from actors.machines import alive_nodes

    found = [(node["NodeManagerAddress"], node["Resources"]) for node in alive_nodes()]
    return tuple(
        ClusterMachine(address, int(room.get("object_store_memory", 0)), has_gpu=room.get("GPU", 0) > 0)
        for address, room in found
        if room.get("CPU", 0) > 0
    )


def _most_by_autoscaler() -> dict[str, float]:
    """Return the cluster's resources once its autoscaler has started all machines that it may; empty without one."""
    # Private: public APIs return only the machines that run now.
    from ray._private.state import state

    return {name: float(most) for name, most in (state.get_max_resources_from_cluster_config() or {}).items()}


def _this_machine() -> Resources:
    memory, shared = machine.memory_bytes(), machine.shared_memory_bytes()
    most = _MOST_STORE if shared is None else min(_MOST_STORE, max(_LEAST_SHARED, _SHARED_SHARE * shared))
    return Resources(
        where="this machine",
        cpus=machine.num_cpus(),
        gpus=machine.num_gpus(),
        memory_bytes=memory,
        object_store_bytes=int(min(_OBJECT_STORE_SHARE * memory, most)),
        gpu_memory_bytes=machine.gpu_memory_bytes(),
        num_machines=1,
        machines=(),
        is_ours=True,
    )


def _check_address(address: str) -> None:
    """Raise UserError for an address that cannot work: Ray itself would take more than a minute to report it."""
    if "://" in address:
        raise UserError(
            f"RAY_ADDRESS is {address}, and a run connects to a cluster's HOST:PORT from one of its machines; "
            f"use `{program()} submit`, or unset it to run on this machine"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > _LAST_PORT:
        # A word like `auto`, or an address that Ray itself rejects at once.
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise UserError(
            f"no Ray cluster answers at RAY_ADDRESS {address}: {reason(error)}; unset it to run on this machine"
        ) from error
