"""The Ray Serve deployment of the HTTP application: engines die, the ingress goes on with another."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import structlog
import torch
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from starlette.types import ASGIApp

from deploy.service.app import Service, create_app, guarded
from deploy.service.gate import Rates
from deploy.service.keys import Keys
from deploy.service.messages import EngineLostError, EngineState, Event, Job
from deploy.service.source import Source

_STATE_TIMEOUT_S = 3.0
LOST = (RayError, BackPressureError, DeploymentUnavailableError, RequestCancelledError)
"""What a call to engines fails with when it did not reach one, or not its end."""


class Fleet:
    """The engine replicas behind one handle: Serve finds one that is alive."""

    def __init__(self, handle: Any) -> None:
        self._handle, self._streaming = handle, handle.options(stream=True)

    async def stream(self, job: Job) -> AsyncGenerator[list[Event], None]:
        """As `Backend.stream`."""
        response = self._streaming.stream.remote(job)
        try:
            async for events in response:
                yield events
        except RayTaskError:
            # Not the engine's death but a mistake of ours: another engine would make it again.
            raise
        except LOST as error:
            raise EngineLostError(f"{type(error).__name__}: {error}") from error
        finally:
            # Where it has ended this does nothing; else it frees the slots.
            response.cancel()

    async def states(self) -> list[EngineState]:
        """As `Backend.states`; those that do not answer in time are left out."""
        try:
            answers = await self._handle.broadcast("state").results_async(
                timeout_s=_STATE_TIMEOUT_S, return_exceptions=True
            )
        except (*LOST, TimeoutError) as error:
            structlog.get_logger().warning("engines_not_heard", error=str(error))
            return []
        return [answer for answer in answers if isinstance(answer, EngineState)]


# Wider than the application's own limits, which answer in our error format: Serve's text must not reach a client.
@serve.deployment(
    max_ongoing_requests=4096,
    max_queued_requests=8192,
    max_surge_percent=100,
    health_check_period_s=5,
    graceful_shutdown_timeout_s=60,
    ray_actor_options={"num_cpus": 0.01},
)
@serve.ingress()
class Ingress:
    """Answers HTTP requests."""

    def __init__(self, engines: Any, source: Source, keys: Keys, rate_limit: str, _admin: Any) -> None:
        """Answer with `engines`, a handle of `EngineReplica`.

        Serve deploys what an argument names: `_admin` is a handle of `AdminListener`, or None.
        """
        torch.set_num_threads(1)
        codec = source.codec()
        self._keys, self._rate_limit = keys, rate_limit
        self._service = Service(
            backend=Fleet(engines),
            codec=codec,
            planner=source.planner(codec),
            run=source.run_view(),
            registry=source.registry_reader(),
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        self._app = create_app(self._service)
        return guarded(self._app, self._keys, Rates(self._rate_limit))

    async def drain(self) -> int:
        """Take nothing more. Returns the requests under way."""
        inference = self._app.state.inference
        inference.is_draining = True
        return int(inference.num_open)
