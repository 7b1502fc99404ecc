"""Ray Serve deployment of the HTTP application, and its calls to the engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import structlog
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.types import ASGIApp

from deploy.service.api.app import create_app, guarded
from deploy.service.contract import DRAIN_TIMEOUT_S, EngineLostError, EngineState, Event, Job, is_last
from deploy.service.gateway.access import Callers
from deploy.service.gateway.keys import ApiKeys, RateLimits, SharedCounts
from deploy.service.on_ray.ray_metrics import RequestMetrics
from deploy.service.source import Address, Source

_LOST = (RayError, RayServeException)
_CALL_TIMEOUT_S = 3.0
# The engine ends every job in time. One that is silent for longer counts as lost.
_GRACE_S = 10.0


class ServeEngines:
    """The engine replicas behind a handle of Ray Serve, as a `Backend`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._jobs = handle.options(method_name="stream", stream=True)

    async def stream(self, job: Job) -> AsyncGenerator[list[Event], None]:
        """See `Backend.stream`: Serve's router chooses the replica, and waits for one if there is none."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + job.timeout_s + _GRACE_S
        response, is_ended = self._jobs.remote(job), False
        try:
            while True:
                async with asyncio.timeout_at(deadline):
                    events = await anext(response, None)
                if events is None:
                    return
                is_ended = is_last(events[-1])
                paused_s = clock()
                yield events
                # A slow client is not a silent engine.
                deadline += clock() - paused_s
        except (*_LOST, TimeoutError) as error:
            raise EngineLostError(f"{type(error).__name__}: {error}") from error
        finally:
            if not is_ended:
                # Frees the slots.
                response.cancel()

    async def states(self) -> list[EngineState]:
        """See `Backend.states`."""
        try:
            response = self._handle.broadcast("state")
            # In a thread: `results_async` fails for all engines if one does not answer.
            found = await asyncio.to_thread(response.results, timeout_s=_CALL_TIMEOUT_S, return_exceptions=True)
        except (*_LOST, TimeoutError, RuntimeError) as error:
            # RuntimeError: Serve's router does not know its replicas yet.
            structlog.get_logger().warning("engines_not_heard", error=str(error))
            return []
        return [state for state in found if isinstance(state, EngineState)]


@serve.deployment(
    # Above the application's own limits, so that it refuses the excess itself (429 with Retry-After).
    max_ongoing_requests=1024,
    max_surge_percent=100,
    health_check_period_s=1,
    graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S + 10,
    ray_actor_options={"num_cpus": 0.01},
)
@serve.ingress()
class Ingress:
    """Answers the HTTP requests that Serve's proxies forward."""

    def __init__(self, engines: Any, source: Source, keys: ApiKeys, address: Address, *, is_alone: bool) -> None:
        """Answer with `engines`, a handle of `EngineReplica`; the proxies listen on `address`.

        Unless it `is_alone`, all ingresses count each key's requests together.
        """
        settings, url = source.settings, None if is_alone else source.registry_url
        self._rates = RateLimits(settings.rate_limit, None if url is None else SharedCounts(url, source.name))
        self._callers = Callers.of(address.host, settings.allowed_hosts, settings.allowed_origins)
        self._app = create_app(source.service(ServeEngines(engines)))
        self._keys, self._address = keys, address

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application for Serve, behind access control and metrics."""
        metrics = RequestMetrics(serve.get_replica_context().app_name)
        return guarded(self._app, self._keys, self._rates, metrics, callers=self._callers)

    async def address(self) -> Address:
        """Return where the service listens."""
        return self._address

    async def drain(self) -> int:
        """Accept no more requests. Returns the number in progress."""
        inference = self._app.state.inference
        inference.is_draining = True
        return int(inference.places.num)
