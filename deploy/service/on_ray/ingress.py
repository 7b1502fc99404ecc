"""The Ray Serve deployment of the HTTP application: engines die, the ingress goes on with another."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import structlog
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError

from deploy.service.api.app import Service, create_app, guarded
from deploy.service.contract import DRAIN_TIMEOUT_S, EngineState
from deploy.service.gateway.address import Address
from deploy.service.gateway.api_keys import ApiKeys
from deploy.service.gateway.http_server import HttpServer
from deploy.service.gateway.rate_limits import RateLimits, SharedCounts
from deploy.service.link.contact import Contact
from deploy.service.link.fleet import Fleet
from deploy.service.on_ray.ray_metrics import RequestMetrics
from deploy.service.source import Source

LOST = (RayError, BackPressureError, DeploymentUnavailableError, RequestCancelledError)
"""What a call to engines fails with when it did not reach one, or not its end."""
_CALL_TIMEOUT_S = 3.0


def heard(response: Any, timeout_s: float) -> list[object]:
    """What engines answer to a broadcast of Serve's in time, exceptions among it; nothing where it reaches none."""
    try:
        return list(response.results(timeout_s=timeout_s, return_exceptions=True))
    except (*LOST, TimeoutError) as error:
        structlog.get_logger().warning("engines_not_heard", error=str(error))
        return []


class ServeDirectory:
    """The engine replicas behind a handle of Ray Serve, as a `Directory`."""

    def __init__(self, handle: Any) -> None:
        self._handle, self._node_id = handle, ray.get_runtime_context().get_node_id()

    async def contacts(self) -> list[Contact]:
        """As `Directory.contacts`."""
        return [answer for answer in await self._ask("contact", self._node_id) if isinstance(answer, Contact)]

    async def states(self) -> list[EngineState]:
        """As `Directory.states`."""
        return [answer for answer in await self._ask("state") if isinstance(answer, EngineState)]

    async def _ask(self, method: str, *args: object) -> list[object]:
        try:
            response = self._handle.broadcast(method, *args)
        except RuntimeError as error:
            # Serve's router has not heard of replicas yet.
            structlog.get_logger().warning("engines_not_heard", error=str(error))
            return []
        # In a thread: `results_async` gives up on all where one does not answer.
        return await asyncio.to_thread(heard, response, _CALL_TIMEOUT_S)


@serve.deployment(
    # Requests go past Serve; what goes through it asks it to drain.
    max_surge_percent=100,
    health_check_period_s=1,
    graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S + 10,
    ray_actor_options={"num_cpus": 0.01},
)
class Ingress:
    """Answers HTTP requests."""

    def __init__(self, engines: Any, source: Source, keys: ApiKeys, address: Address, *, is_alone: bool) -> None:
        """Answer with `engines`, a handle of `EngineReplica`. Several ingresses count a key's requests together."""
        codec = source.codec()
        service = Service(
            backend=Fleet(ServeDirectory(engines)),
            codec=codec,
            planner=source.planner(codec),
            checkpoints=source.checkpoints(),
            examples=source.examples(),
            registry=source.registry_reader(),
        )
        self._app = create_app(service)
        url = None if is_alone else source.registry_url
        rates = RateLimits(source.rate_limit, None if url is None else SharedCounts(url, source.name))
        self._server = HttpServer(
            guarded(
                self._app,
                keys,
                rates,
                RequestMetrics(serve.get_replica_context().app_name),
                callers=source.callers(address.host),
            ),
            address,
            end_within_s=DRAIN_TIMEOUT_S,
            # With its successor, and with others on the same machine.
            shares_port=True,
        )
        self._has_ended = False

    def check_health(self) -> None:
        """Serve asks every second, and replaces what raises."""
        if not self._has_ended:
            self._server.check()

    async def drain(self) -> int:
        """Take nothing more. Returns the requests under way."""
        inference = self._app.state.inference
        inference.is_draining = True
        return int(inference.num_open)

    async def end(self) -> None:
        """Send what is answered to its end, and listen no more."""
        self._has_ended = True
        await asyncio.to_thread(self._server.end, DRAIN_TIMEOUT_S + 1)

    async def __del__(self) -> None:
        """Serve calls it once, when it stops a replica: what is under way comes to its end."""
        # Streams of events have none of their own.
        self._app.state.inference.is_leaving = True
        await self.end()
