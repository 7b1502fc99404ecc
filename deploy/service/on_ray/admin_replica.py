"""The Ray Serve deployment of the admin listener: a server and a port of its own."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError

from actors.registry.records import PolicyVersion
from actors.weights.store import stored_versions
from deploy.service.admin.admin_app import create_admin_app, guarded_admin
from deploy.service.admin.steering import Steering
from deploy.service.api.policy_events import RegistryReader
from deploy.service.contract import EngineState
from deploy.service.gateway.address import Address
from deploy.service.gateway.api_keys import ApiKeys
from deploy.service.gateway.http_server import ON_HEAD, HttpServer
from deploy.service.gateway.rate_limits import RateLimits
from deploy.service.on_ray.ingress import LOST, heard
from deploy.service.source import Source

_CALL_TIMEOUT_S = 5.0


class EnginesOfHandle:
    """The engine replicas behind a handle, asked all at once."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def states(self) -> list[EngineState]:
        """As `Engines.states`."""
        found = heard(self._handle.broadcast("state"), _CALL_TIMEOUT_S)
        return [answer for answer in found if isinstance(answer, EngineState)]

    def prepare(self, policy: PolicyVersion, timeout_s: float) -> list[str]:
        """As `Engines.prepare`."""
        try:
            found = self._handle.broadcast("prepare", policy).results(timeout_s=timeout_s, return_exceptions=True)
        except LOST as error:
            raise TimeoutError(str(error)) from error
        return [why for answer in found if (why := _refusal(answer)) is not None]

    def stored(self, store: str) -> frozenset[int]:
        """As `Engines.stored`."""
        return stored_versions(store, _CALL_TIMEOUT_S)


def _refusal(answer: object) -> str | None:
    """What an engine has against a version, from what it answered or failed with."""
    if isinstance(answer, RayError) and not isinstance(answer, RayTaskError):
        # It died, and has nothing to say: the engine in its place begins with what is wanted.
        return None
    return None if answer is None else str(answer).strip().splitlines()[-1]


# One, and none beside it while it is replaced: there is one port.
@serve.deployment(
    num_replicas=1,
    max_surge_percent=0,
    health_check_period_s=5,
    graceful_shutdown_timeout_s=5,
    ray_actor_options=ON_HEAD,
)
class AdminListener:
    """Answers an operator."""

    def __init__(self, engines: Any, source: Source, address: Address, keys: ApiKeys) -> None:
        """Listen. Raises OSError where the port stays taken."""
        registry = source.registry()
        assert registry is not None, "a checkpoint by itself has nothing to administer"
        steering = Steering(registry, source.path, EnginesOfHandle(engines))
        app = create_admin_app(steering, RegistryReader(registry))
        gated = guarded_admin(app, keys, RateLimits(source.rate_limit), source.callers(address.host, is_admin=True))
        self._server = HttpServer(gated, address, end_within_s=1)

    def check_health(self) -> None:
        """Serve asks every few seconds, and replaces what raises."""
        self._server.check()
