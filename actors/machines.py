"""Machines of the connected Ray cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_LOOK_TIMEOUT_S = 60.0
# Clients of NFS may know for a few seconds that a directory did not exist.
_NEW_DIRECTORY_S = 10.0


def num_machines() -> int:
    """Return the number of machines of the cluster."""
    return len({node["NodeManagerAddress"] for node in alive_nodes()})


def machines_without(directory: Path) -> list[str]:
    """Return the addresses of other machines that may get actors and do not see a directory of this one.

    Machines that do not answer within a minute are left out: they may just have been lost.
    """
    here = ray.get_runtime_context().get_node_id()
    look: Any = ray.remote(num_cpus=0)(_sees)
    asked = {}
    for node in alive_nodes():
        if node["NodeID"] != here and node["Resources"].get("CPU"):
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[look.options(scheduling_strategy=there).remote(directory)] = node["NodeManagerAddress"]
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_LOOK_TIMEOUT_S) if asked else ([], [])
    return sorted(asked[answer] for answer in answered if not _result(answer))


def alive_nodes() -> list[dict[str, Any]]:
    """Return the cluster's nodes that are alive, as `ray.nodes` describes them."""
    return [node for node in ray.nodes() if node["Alive"]]


def _sees(directory: Path) -> bool:
    deadline = time.monotonic() + _NEW_DIRECTORY_S
    while not directory.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def _result(answer: Any) -> bool:
    """Return a machine's answer; True if it was lost meanwhile."""
    try:
        return bool(ray.get(answer))
    except RayError:
        return True
