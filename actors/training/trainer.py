"""Ray Train's trainer as d1 uses it: without callbacks that cost seconds, and on the network of Ray's nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import psutil
import ray
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

# Private: Ray has no setting that leaves these out, and no other names for them.
# Ray's datasets are not needed: the data come from the coordinator. The cleaner frees the placement group after its
# controller died, which ends the run and its job, whose resources Ray frees anyway.
_UNUSED = (DatasetsCallback, PlacementGroupCleanerCallback)


class Trainer(TorchTrainer):
    """TorchTrainer without processes for Ray's datasets and placement groups: each costs two seconds per start of the
    group."""

    def _create_default_callbacks(self) -> list[Any]:
        # mypy sees the previous version of the trainer: Ray chooses the version on import.
        callbacks = super()._create_default_callbacks()  # type: ignore[misc]
        return [one for one in callbacks if not isinstance(one, _UNUSED)]


class _OnNodeInterface(TorchConfig().backend_cls):  # type: ignore[misc] # The property's type is the base class.
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        # Before the process group exists: each gloo group, also a later one, reads the variable when it is made.
        worker_group.execute(choose_interface)
        super().on_start(worker_group, backend_config)


class NodeTorchConfig(TorchConfig):
    """TorchConfig whose process groups use the network interface of each worker's Ray node (`choose_interface`)."""

    @property
    def backend_cls(self) -> type[_OnNodeInterface]:
        """The backend, in Ray Train's terms."""
        return _OnNodeInterface


def choose_interface() -> None:
    """Make gloo and NCCL use the network interface that has the address of this process's Ray node.

    By default gloo uses the address that the hostname resolves to: on Debian 127.0.1.1, which no other machine reaches.
    A variable that the user has set stays. Without such an interface, as behind address translation, so do the
    defaults.
    """
    interface = next(_interfaces_with(ray.util.get_node_ip_address()), None)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # NCCL takes a bare name as a prefix: eth1 would match eth10.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def _interfaces_with(address: str) -> Iterator[str]:
    for interface, addresses in psutil.net_if_addrs().items():
        # An IPv6 address of a link is followed by %interface.
        if any(one.address.partition("%")[0] == address for one in addresses):
            yield interface
