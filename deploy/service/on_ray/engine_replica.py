"""Ray Serve deployment of an engine: a process with its versions and its follower."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog
import torch
from ray import serve
from structlog.contextvars import bind_contextvars

from deploy.service.contract import DRAIN_TIMEOUT_S, ENGINE_FAILED, EngineState, Event, Job
from deploy.service.engine.engine import Engine
from deploy.service.engine.engine_host import EngineHost
from deploy.service.engine.follower import VersionFollower
from deploy.service.on_ray.given_device import given_device
from deploy.service.on_ray.ray_metrics import EngineMetrics
from deploy.service.source import Source


@serve.deployment(
    # Above the engine's own limit, so that it refuses the excess itself (429 with Retry-After).
    max_ongoing_requests=1024,
    # A new deployment of the run starts its replicas before the old ones stop.
    max_surge_percent=100,
    health_check_period_s=1,
    graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S + 10,
    # Small enough to be placed next to a run that has all the CPUs.
    ray_actor_options={"num_cpus": 0.01},
)
class EngineReplica:
    """Denoises with the newest version of one run, or with a checkpoint."""

    def __init__(self, source: Source, num_threads: int) -> None:
        """Load the newest checkpoint, or the version that the registry announces."""
        torch.set_num_threads(num_threads)
        versions = source.versions(given_device(), num_threads)
        self._follower: VersionFollower | None = None
        if (registry := source.registry()) is not None:
            self._follower = VersionFollower(registry, versions, source.path)
            # Before it becomes healthy, so that it never answers with an older version than the other replicas.
            self._follower.follow_once(0)
            self._follower.ensure_running()
        context = serve.get_replica_context()
        replica = context.replica_id.unique_id
        self._host = EngineHost(versions, Engine(versions), replica=replica, follower=self._follower)
        self._metrics = EngineMetrics(context.app_name, replica)

    async def stream(self, job: Job) -> AsyncGenerator[list[Event], None]:
        """See `Backend`. Serve cancels it when the ingress cancels its call."""
        bind_contextvars(request_id=job.request_id)
        try:
            async with aclosing(self._host.stream(job)) as stream:
                async for events in stream:
                    yield events
        except Exception:
            structlog.get_logger().exception("job_failed")
            yield [ENGINE_FAILED]

    async def state(self) -> EngineState:
        """Return the state of this engine."""
        return self._host.state()

    def check_health(self) -> None:
        """Update the metrics. Serve calls it every second, and replaces a dead replica."""
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
        if not engine.is_alive:
            structlog.get_logger().error("engine_thread_died")
            # Serve would wait for the jobs of an unhealthy replica. This way they continue on another one at once.
            os._exit(1)

    async def __del__(self) -> None:
        """Stop the engine. Serve calls it once the jobs of a replica that it stops have ended."""
        await asyncio.to_thread(self._host.engine.close)
