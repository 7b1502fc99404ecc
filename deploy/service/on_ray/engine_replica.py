"""The Ray Serve deployment of an engine: one process with its versions and its follower."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import ray
import torch
from ray import serve

from deploy.service.contract import DRAIN_TIMEOUT_S, EngineState, FollowerStatus
from deploy.service.engine.engine import Engine
from deploy.service.engine.engine_host import EngineHost
from deploy.service.engine.engine_server import EngineServer
from deploy.service.engine.follower import VersionFollower
from deploy.service.link.contact import LOOPBACK, Contact
from deploy.service.on_ray.given_device import given_device
from deploy.service.on_ray.ray_metrics import EngineMetrics
from deploy.service.source import Source


@serve.deployment(
    # Jobs go past Serve; these ask how it stands.
    max_ongoing_requests=256,
    # A new deployment of the run starts its replicas before the old ones stop.
    max_surge_percent=100,
    # A dead one is noticed here, and nowhere earlier: the others do its work until the next has started.
    health_check_period_s=1,
    graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S + 10,
    # Little enough to be placed beside a run that has all the CPUs.
    ray_actor_options={"num_cpus": 0.01},
)
class EngineReplica:
    """Denoises with the newest version of one run, or with a checkpoint."""

    def __init__(self, source: Source, num_threads: int) -> None:
        """Begin with the newest checkpoint, or with what the registry already announces."""
        torch.set_num_threads(num_threads)
        versions = source.versions(given_device(), num_threads)
        self._follower: VersionFollower | None = None
        follower_status: Callable[[], FollowerStatus] | None = None
        if (registry := source.registry()) is not None:
            self._follower = follower = VersionFollower(registry, versions, source.path)
            # Not healthy before it has what its siblings serve: a new replica never answers with an older version.
            follower.follow_once(0)
            follower.ensure_running()
            follower_status = lambda: follower.status  # noqa: E731 - it is asked each time
        replica = serve.get_replica_context().replica_id.unique_id
        self._host = EngineHost(versions, Engine(versions), replica=replica, follower_status=follower_status)
        self._listener = EngineServer(self._host, replica)
        self._metrics = EngineMetrics(serve.get_replica_context().app_name, replica)

    async def contact(self, node_id: str) -> Contact:
        """Where an ingress on that node of Ray reaches it: nothing but loopback is opened until one elsewhere asks."""
        is_here = node_id == ray.get_runtime_context().get_node_id()
        address = LOOPBACK if is_here else ray.util.get_node_ip_address()
        return await asyncio.to_thread(self._listener.contact, address)

    async def state(self) -> EngineState:
        """How it stands."""
        return self._host.state()

    def check_health(self) -> None:
        """Serve asks every second, and replaces what raises."""
        if self._follower is not None:
            self._follower.ensure_running()
        engine, versions = self._host.engine, self._host.versions
        versions.forget_idle()
        self._metrics.show(
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_swaps=versions.num_swaps,
            version=versions.policy.version,
        )
        if not (engine.is_alive and self._listener.is_alive):
            raise RuntimeError("a thread of the engine has died")

    async def __del__(self) -> None:
        """Serve calls it once, when it stops a replica: what is under way comes to its end."""
        # What an engine without its thread has under way ends on another.
        await asyncio.to_thread(self._listener.close, DRAIN_TIMEOUT_S if self._host.engine.is_alive else 0.0)
        await asyncio.to_thread(self._host.engine.close)
