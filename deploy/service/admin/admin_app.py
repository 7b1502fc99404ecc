"""The HTTP application of the admin listener: what an operator asks of a run's service. It knows no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from actors.registry.records import BASE, BEST, NEWEST, POLICY, PolicyVersion
from deploy.service.admin.steering import Steering, SteeringError, UnknownVersionError, UnreadyError, served_by
from deploy.service.api.policy_events import RegistryReader
from deploy.service.api.policy_view import score_of
from deploy.service.api.server_sent_events import ServerSentEvents
from deploy.service.errors import ServiceError, install_handlers
from deploy.service.gateway.access import AccessControl, nothing_open
from deploy.service.gateway.api_keys import ApiKeys
from deploy.service.gateway.callers import ANYBODY, Callers
from deploy.service.gateway.rate_limits import RateLimits

MAX_VERSIONS = 1000
_Result = TypeVar("_Result")
_Why = Annotated[str, Field(max_length=500)]


class Reason(BaseModel):
    """The body of a change."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    why: _Why = ""
    """What the event says."""


_UNSAID = Reason()


class Pin(Reason):
    """The body of `POST /admin/pin`."""

    version: Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
    """The policy version."""


def guarded_admin(app: FastAPI, keys: ApiKeys, rates: RateLimits, callers: Callers = ANYBODY) -> ASGIApp:
    """The application behind its gate: every path wants a key."""
    return AccessControl(app, keys, rates, nothing_open, callers)


def create_admin_app(steering: Steering, events: RegistryReader) -> FastAPI:
    """The application; `guarded_admin` closes it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        events.close()

    app = FastAPI(title="d1 admin", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan)
    install_handlers(app)
    # Two operators' changes do not mix.
    changing = asyncio.Lock()

    async def changed(change: Callable[[], _Result]) -> _Result:
        async with changing:
            return await _answered(change)

    _add_views(app, steering, events)
    _add_pins(app, steering, changed)
    _add_pauses(app, steering, changed)
    return app


_Changed = Callable[[Callable[[], Any]], Any]


def _add_views(app: FastAPI, steering: Steering, events: RegistryReader) -> None:
    @app.get("/admin/policy")
    async def policy(limit: Annotated[int, Query(ge=1, le=MAX_VERSIONS)] = 100) -> dict[str, Any]:
        return await _answered(lambda: _policy_body(steering, limit))

    @app.get("/admin/events")
    async def stream(request: Request) -> Response:
        return ServerSentEvents(events.events(request.headers.get("last-event-id")))


def _add_pins(app: FastAPI, steering: Steering, changed: _Changed) -> None:
    @app.post("/admin/pin")
    async def pin(body: Pin) -> dict[str, Any]:
        served = await changed(lambda: steering.pin(body.version, body.why))
        return await _wanted(steering, served)

    @app.delete("/admin/pin")
    async def unpin(why: _Why = "") -> dict[str, Any]:
        await changed(lambda: steering.unpin(why))
        return await _wanted(steering, None)

    @app.post("/admin/rollback")
    async def roll_back(body: Reason = _UNSAID) -> dict[str, Any]:
        version, served = await changed(lambda: steering.roll_back(body.why))
        return {"policy_version": version} | await _wanted(steering, served)


def _add_pauses(app: FastAPI, steering: Steering, changed: _Changed) -> None:
    @app.post("/admin/pause")
    async def pause(body: Reason = _UNSAID) -> dict[str, Any]:
        await changed(lambda: steering.pause(body.why))
        return await _wanted(steering, None)

    @app.post("/admin/resume")
    async def resume(body: Reason = _UNSAID) -> dict[str, Any]:
        await changed(lambda: steering.resume(body.why))
        return await _wanted(steering, None)


async def _wanted(steering: Steering, served: dict[str, int] | None) -> dict[str, Any]:
    """What holds now, and what each engine serves: as just seen, or as it is now."""

    def body() -> dict[str, Any]:
        admin = steering.registry.admin()
        engines = served_by(steering.engines.states()) if served is None else served
        return {"pinned": admin.pinned, "paused": admin.is_paused, "engines": _engines(engines)}

    return await _answered(body)


async def _answered(work: Callable[[], _Result]) -> _Result:
    """Do it in a thread; what it raises becomes an answer."""
    try:
        return await asyncio.to_thread(work)
    except UnknownVersionError as error:
        raise ServiceError(404, str(error), "model_not_found", param="version") from error
    except UnreadyError as error:
        raise ServiceError(503, str(error), "unavailable", retry_after_s=5) from error
    except SteeringError as error:
        raise ServiceError(409, str(error), "not_servable", param="version") from error
    except ConnectionError as error:
        message = "The registry cannot be reached; try again."
        raise ServiceError(503, message, "unavailable", retry_after_s=5) from error


def _policy_body(steering: Steering, limit: int) -> dict[str, Any]:
    standing = steering.registry.snapshot()
    policies = steering.registry.versions()[-limit:]
    loadable = steering.loadable(policies)
    return {
        "policy_version": standing.aliases.get(POLICY),
        "newest": standing.aliases.get(NEWEST),
        "base": standing.aliases.get(BASE),
        "best": standing.aliases.get(BEST),
        "pinned": standing.admin.pinned,
        "paused": standing.admin.is_paused,
        "engines": _engines(served_by(steering.engines.states())),
        "versions": [
            _version_body(policy, policy.version in loadable, policy.version in standing.refused)
            for policy in reversed(policies)
        ],
    }


def _version_body(policy: PolicyVersion, is_loadable: bool, is_refused: bool) -> dict[str, Any]:
    return {
        "policy_version": policy.version,
        "round": policy.round,
        "phase": policy.phase,
        "checksum": policy.manifest_digest,
        "score": score_of(policy),
        "checkpoint": policy.checkpoint,
        "is_loadable": is_loadable,
        "is_refused": is_refused,
    }


def _engines(served: dict[str, int]) -> list[dict[str, Any]]:
    return [{"id": replica, "policy_version": version} for replica, version in served.items()]
