"""The HTTP application in front of engines, without Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import fastapi
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from actors.registry.records import POLICY, PolicyVersion
from deploy.page.routes import page_router
from deploy.program import version_of
from deploy.requests.body import DetokenizeRequest, TokenizeRequest
from deploy.service.api import replies
from deploy.service.api.inference import Inference, Places, ServicePlanner, add_completions
from deploy.service.api.metrics import ServiceMetrics
from deploy.service.api.openapi import describe, described
from deploy.service.api.policy_events import RegistryReader, one_event
from deploy.service.api.policy_view import EngineWatch, known, newest, policy_body, version_body
from deploy.service.api.server_sent_events import ServerSentEvents
from deploy.service.api.text_codec import TextCodec
from deploy.service.api.writer import as_json
from deploy.service.checkpoints import Checkpoints
from deploy.service.contract import Backend, EngineState
from deploy.service.errors import ServiceError, install_handlers
from deploy.service.example import example_prompts
from deploy.service.gateway.access import ANYBODY, AccessControl, BoundedRoute, Callers, RequestObserver
from deploy.service.gateway.keys import ApiKeys, RateLimits

_Number = Annotated[int, fastapi.Path(ge=0, le=2**31 - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """Dependencies of the application."""

    backend: Backend
    """The engines."""
    codec: TextCodec
    """Tokenization of the policy."""
    planner: ServicePlanner
    """Planner of requests."""
    checkpoints: Checkpoints | None
    """Checkpoints of the run; None for a single checkpoint."""
    directory: Path
    """Directory of the run or the checkpoint, for example prompts."""
    registry: RegistryReader | None
    """The run's registry; None for a single checkpoint."""
    max_open: int = 256
    """Maximum completion requests in progress in this ingress."""
    max_listeners: int = 256
    """Maximum streams of policy events in this ingress."""


def guarded(
    app: FastAPI, keys: ApiKeys, rates: RateLimits, *observers: RequestObserver, callers: Callers = ANYBODY
) -> ASGIApp:
    """Return the application behind access control. `observers` and `/metrics` count all requests, refused ones too."""
    metrics: ServiceMetrics = app.state.metrics
    return callers.allowing(
        AccessControl(app, keys, rates, callers=callers, observers=(metrics, *observers), paths=metrics.paths)
    )


def create_app(service: Service) -> FastAPI:
    """Create the application, which `guarded` protects."""
    watch = EngineWatch(service.backend)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        if service.registry is not None:
            service.registry.close()

    # The interactive documentation pages load scripts from elsewhere; the schema itself is behind the key.
    app = FastAPI(title="d1", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan)
    app.router.route_class = BoundedRoute
    install_handlers(app)
    inference = Inference(service.backend, service.codec, service.planner, service.max_open)
    listeners = Places(service.max_listeners, "{num} clients listen to events; try again.", retry_after_s=5)
    app.state.inference, app.state.listeners = inference, listeners
    add_completions(app, inference)
    _add_models(app, service, watch)
    _add_tokens(app, service)
    _add_policy(app, service, watch, inference, listeners)
    _add_health(app, watch, inference)
    app.include_router(page_router())
    describe(app)
    paths = (getattr(route, "path", "/") for route in app.routes)
    app.state.metrics = ServiceMetrics(frozenset(path for path in paths if "{" not in path))
    return app


def _add_models(app: FastAPI, service: Service, watch: EngineWatch) -> None:
    codec, planner, began_s = service.codec, service.planner, int(time.time())

    def about(name: str, version: int) -> replies.Model:
        return replies.Model(
            id=name,
            object="model",
            created=began_s,
            owned_by="d1",
            policy_version=version,
            max_model_len=codec.config.max_sequence_length,
        )

    def aliases(states: Sequence[EngineState]) -> dict[str, int]:
        found = policy_body(planner.name, states).aliases
        return found | dict.fromkeys(planner.aliases, found[POLICY])

    @app.get("/v1/models", **described(replies.Models, 503))
    async def list_models() -> replies.Models:
        states = await _states(watch)
        live = {policy.version for state in states for policy in state.live}
        stored = () if service.checkpoints is None else await asyncio.to_thread(service.checkpoints.versions)
        versions = {f"policy@v{version:06d}": version for version in sorted({*live, *stored}, reverse=True)}
        return replies.Models(object="list", data=[about(*one) for one in (aliases(states) | versions).items()])

    # A name may contain slashes, as on the Hugging Face hub.
    @app.get("/v1/models/{name:path}", **described(replies.Model, 404, 503))
    async def model(name: str) -> replies.Model:
        wanted, states = planner.wanted(name), await _states(watch)
        if isinstance(wanted, int):
            return about(name, (await _found(service, states, wanted, "model")).version)
        found = aliases(states).get(name)
        if found is None:
            raise ServiceError(404, "There is no such model here.", "model_not_found", param="model")
        return about(name, found)


def _add_tokens(app: FastAPI, service: Service) -> None:
    codec, planner = service.codec, service.planner

    @app.post("/tokenize", **described(replies.Tokens, 400, 404, 408, 413))
    async def tokenize(body: TokenizeRequest) -> Response:
        planner.wanted(body.model)
        # Also creates the JSON: FastAPI would validate each id.
        return Response(await asyncio.to_thread(tokens, body), media_type="application/json")

    def tokens(body: TokenizeRequest) -> bytes:
        if body.messages is not None:
            turns, adds_special = [message.turn for message in body.messages], bool(body.add_special_tokens)
            ids = codec.encode_chat(turns, template=body.template_variables, adds_special=adds_special)
        else:
            ids = codec.encode_any(body.prompt or "", adds_special=body.add_special_tokens is not False)
        most = codec.config.max_sequence_length
        return as_json(replies.Tokens(tokens=ids, count=len(ids), max_model_len=most))

    @app.post("/detokenize", **described(replies.Detokenized, 400, 404, 408, 413))
    async def detokenize(body: DetokenizeRequest) -> replies.Detokenized:
        planner.wanted(body.model)
        if any(not 0 <= token < codec.config.vocab_size for token in body.tokens):
            message = f"Token ids of this policy lie between 0 and {codec.config.vocab_size - 1}."
            raise ServiceError(400, message, "invalid_value", param="tokens")
        return replies.Detokenized(prompt=await asyncio.to_thread(codec.decode_any, body.tokens))


def _add_policy(app: FastAPI, service: Service, watch: EngineWatch, inference: Inference, listeners: Places) -> None:
    def is_over() -> bool:
        return inference.is_draining

    @app.get("/v1/policy", **described(replies.Policy, 503))
    async def policy() -> replies.Policy:
        return policy_body(service.planner.name, await _states(watch))

    @app.get(
        "/v1/policy/events",
        response_class=ServerSentEvents,
        **described(None, 503, events=(replies.PolicyEvent,), is_ended=False),
    )
    async def events(request: Request) -> Response:
        inference.check_accepting()
        last_id = request.headers.get("last-event-id")
        if service.registry is None:
            stream = one_event(newest(await _states(watch)).policy, last_id, is_over)
        else:
            stream = service.registry.events(last_id, is_over)
        listeners.take()
        return ServerSentEvents(stream, listeners.free)

    # Also for a single checkpoint, whose model card may have examples.
    @app.get("/v1/policy/examples", **described(replies.PolicyExamples))
    async def examples() -> replies.PolicyExamples:
        task, prompts = await asyncio.to_thread(example_prompts, service.directory)
        return replies.PolicyExamples(task=task, prompts=prompts)

    @app.get("/v1/policy/{version}", **described(replies.PolicyOfVersion, 400, 404, 503))
    async def one(version: _Number) -> replies.PolicyOfVersion:
        states = await _states(watch)
        policy = await _found(service, states, version, "version")
        return version_body(policy, states)


def _add_health(app: FastAPI, watch: EngineWatch, inference: Inference) -> None:
    @app.get("/health", **described(replies.Health, 503))
    async def health() -> replies.Health:
        state = newest(await _states(watch))
        return replies.Health(
            status="ok" if state.follower.registry_reachable else "degraded",
            policy_version=state.policy.version,
            registry_reachable=state.follower.registry_reachable,
            follower_errors=state.follower.num_errors,
        )

    @app.get("/health/ready", **described(replies.Ready, 503))
    async def ready() -> replies.Ready:
        inference.check_accepting()
        states = await _states(watch)
        if watch.is_stale:
            raise ServiceError(503, "No engine answers.", "unavailable", retry_after_s=5)
        return replies.Ready(status="ready", policy_version=newest(states).policy.version, num_engines=len(states))

    # The name in SageMaker and vLLM.
    @app.get("/ping", **described(replies.Ready, 503))
    async def ping() -> replies.Ready:
        return await ready()

    @app.get("/version", **described(replies.D1Version))
    async def version() -> replies.D1Version:
        return replies.D1Version(version=version_of("d1"))

    @app.get("/metrics", response_class=PlainTextResponse, **described(None))
    async def metrics() -> Response:
        return Response(app.state.metrics.text(await watch.states()), media_type="text/plain; version=0.0.4")


async def _states(watch: EngineWatch) -> list[EngineState]:
    states = await watch.states()
    if not states:
        raise ServiceError(503, "No engine answers yet; try again.", "unavailable", retry_after_s=5)
    return states


async def _found(service: Service, states: Sequence[EngineState], version: int, param: str) -> PolicyVersion:
    """Return the metadata of a version from the engines, the registry or the run directory. Raises ServiceError."""
    policy, away = known(version, states), None
    if policy is None and service.registry is not None:
        try:
            policy = await service.registry.version(version)
        except ConnectionError as error:
            away = error
    if policy is None and service.checkpoints is not None:
        policy = await asyncio.to_thread(service.checkpoints.find, version)
    if policy is not None:
        return policy
    if away is not None:
        message = "No engine has that version, and the registry is unreachable; try again."
        raise ServiceError(503, message, "unavailable", retry_after_s=5) from away
    raise ServiceError(404, f"There is no policy version {version} here.", "model_not_found", param=param)
