"""The Ray Serve deployment of the HTTP application: engines die, the ingress goes on with another."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import torch
from ray import serve

from deploy.service.app import Service, create_app, guarded
from deploy.service.fleet import Fleet
from deploy.service.gate import Rates
from deploy.service.keys import Keys
from deploy.service.http_server import HttpServer
from deploy.service.ray_metrics import RequestMetrics
from deploy.service.source import Address, Source

_DRAIN_TIMEOUT_S = 50.0


# Wider than the application's own limits, which answer in our error format: Serve's text must not reach a client.
@serve.deployment(
    max_ongoing_requests=4096,
    max_queued_requests=8192,
    max_surge_percent=100,
    health_check_period_s=5,
    graceful_shutdown_timeout_s=60,
    ray_actor_options={"num_cpus": 0.01},
)
class Ingress:
    """Answers HTTP requests."""

    def __init__(self, engines: Any, source: Source, keys: Keys, rate_limit: str, address: Address, _admin: Any) -> None:
        """Answer with `engines`, a handle of `EngineReplica`.

        Serve deploys what an argument names: `_admin` is a handle of `AdminListener`, or None.
        """
        torch.set_num_threads(1)
        codec = source.codec()
        service = Service(
            backend=Fleet(engines, ray.get_runtime_context().get_node_id()),
            codec=codec,
            planner=source.planner(codec),
            run=source.run_view(),
            registry=source.registry_reader(),
        )
        self._app = create_app(service)
        metrics = RequestMetrics(serve.get_replica_context().app_name)
        guarded_app = guarded(self._app, keys, Rates(rate_limit), metrics)
        self._server = HttpServer(guarded_app, address, end_within_s=_DRAIN_TIMEOUT_S, shares_port=True)

    def check_health(self) -> None:
        """Serve asks every second, and replaces what raises."""
        if not self._server.is_alive:
            raise RuntimeError("the listener's thread has died")

    async def drain(self) -> int:
        """Take nothing more. Returns the requests under way."""
        inference = self._app.state.inference
        inference.is_draining = True
        return int(inference.num_open)

    async def __del__(self) -> None:
        """Serve calls it once, when it stops a replica: what is under way comes to its end."""
        await asyncio.to_thread(self._server.end, _DRAIN_TIMEOUT_S + 1)
