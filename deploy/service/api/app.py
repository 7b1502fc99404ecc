"""The HTTP application in front of engines. It knows no Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import FastAPI, Path
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from actors.registry.records import POLICY, PolicyVersion
from deploy.page.routes import page_router
from deploy.program import version_of
from deploy.requests.body import ChatRequest, CompletionBody, CompletionRequest, DetokenizeRequest, TokenizeRequest
from deploy.requests.planner import RequestPlan
from deploy.service.api import replies
from deploy.service.api.bounded_route import BoundedRoute
from deploy.service.api.metrics import RequestObserver, ServiceMetrics
from deploy.service.api.openapi import describe, described
from deploy.service.api.planner import ServicePlanner
from deploy.service.api.policy_events import RegistryReader, one_event
from deploy.service.api.policy_view import EngineWatch, known, newest, policy_body, version_body
from deploy.service.api.server_sent_events import ServerSentEvents
from deploy.service.api.text_codec import TextCodec
from deploy.service.api.writer import AnswerWriter, Events, as_json
from deploy.service.checkpoints import Checkpoints
from deploy.service.contract import Backend, EngineState
from deploy.service.errors import ErrorBody, ServiceError, install_handlers
from deploy.service.example import Examples
from deploy.service.failover import with_failover
from deploy.service.gateway.access import MAX_BODY_BYTES, AccessControl
from deploy.service.gateway.api_keys import ApiKeys
from deploy.service.gateway.callers import ANYBODY, Callers
from deploy.service.gateway.rate_limits import RateLimits

_Number = Annotated[int, Path(ge=0, le=2**31 - 1)]
GRAMMAR_TIMEOUT_S = 60.0
"""A request waits so long for its grammar to be made, in seconds."""
# What is tokenized in the time that a thread takes to begin.
_SHORT_BYTES = 2048
_REFUSALS = (400, 404, 408, 413, 503)


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """What the application is made of."""

    backend: Backend
    """Who answers."""
    codec: TextCodec
    """How the policy reads and writes."""
    planner: ServicePlanner
    """Makes jobs."""
    checkpoints: Checkpoints | None
    """The checkpoints of the run; None for a checkpoint by itself."""
    examples: Examples
    """Example prompts for the policy."""
    registry: RegistryReader | None
    """Where the run's versions are announced; None of a checkpoint by itself."""
    max_open: int = 256
    """Requests for completions that are under way in this ingress, at most."""
    max_listeners: int = 256
    """Streams of the versions' events in this ingress, at most."""


def guarded(
    app: FastAPI, keys: ApiKeys, rates: RateLimits, *observers: RequestObserver, callers: Callers = ANYBODY
) -> ASGIApp:
    """The application behind its gate. All that is answered is counted and told to `observers`, refusals too."""
    gated = AccessControl(app, keys, rates, callers=callers)
    return callers.allowing(app.state.metrics.measured(gated, *observers))


def create_app(service: Service) -> FastAPI:
    """The application; `guarded` closes it."""
    watch = EngineWatch(service.backend)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.backend.aclose()
        if service.registry is not None:
            service.registry.close()

    # The interactive documentation pages load scripts from elsewhere; the schema itself is behind the key.
    app = FastAPI(title="d1", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan)
    app.router.route_class = BoundedRoute
    install_handlers(app)
    inference = _Inference(service)
    listeners = _Listeners(service.max_listeners)
    app.state.inference, app.state.listeners = inference, listeners
    _add_inference(app, inference)
    _add_models(app, service, watch)
    _add_tokens(app, service)
    _add_policy(app, service, watch, inference, listeners)
    _add_health(app, watch, inference)
    app.include_router(page_router())
    describe(app)
    paths = (getattr(route, "path", "/") for route in app.routes)
    app.state.metrics = ServiceMetrics(frozenset(path for path in paths if "{" not in path))
    return app


class _Inference:
    """Completions, in bounds."""

    def __init__(self, service: Service) -> None:
        self._service, self._num_open = service, 0
        # A grammar takes up to seconds of a core: they wait for each other, and nobody else for them.
        self._grammar_makers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")
        self.is_draining = False
        """Whether new requests are refused, and streams of events end."""

    @property
    def num_open(self) -> int:
        """Requests under way."""
        return self._num_open

    async def complete(self, ask: CompletionBody, request: Request) -> Response:
        """The answer to a body: one object, or a stream."""
        service = self._service
        self._admit()
        is_streamed = False
        try:
            plan = await self._plan(ask, request)
            model, run = ask.model or POLICY, service.planner.name
            writer = AnswerWriter(service.codec, plan, model, run, is_chat=isinstance(ask, ChatRequest))
            job = service.planner.job(ask, plan)
            events = with_failover(service.backend, job, may_restart=not ask.stream)
            if not ask.stream:
                body = await writer.answer(events)
                return Response(as_json(body), headers=_version_header(writer), media_type="application/json")
            await writer.begin(events)
            is_streamed = True
            return ServerSentEvents(writer.chunks(events), lambda: self._end(events), headers=_version_header(writer))
        finally:
            if not is_streamed:
                self._num_open -= 1

    async def _plan(self, ask: CompletionBody, request: Request) -> RequestPlan:
        is_short = int(request.headers.get("content-length", MAX_BODY_BYTES)) <= _SHORT_BYTES
        if ask.structure is not None and not self._service.codec.has_grammar(ask.structure):
            return await self._plan_with_grammar(ask)
        if is_short and ask.structure is None:
            return self._service.planner.plan(ask)
        # Tokenizing a long text, or laying a grammar on a canvas, would hold up every stream.
        return await asyncio.to_thread(self._service.planner.plan, ask)

    async def _plan_with_grammar(self, ask: CompletionBody) -> RequestPlan:
        making = asyncio.get_running_loop().run_in_executor(self._grammar_makers, self._service.planner.plan, ask)
        try:
            async with asyncio.timeout(GRAMMAR_TIMEOUT_S):
                return await making
        except TimeoutError as error:
            message = f"Its grammar was not made in {GRAMMAR_TIMEOUT_S:.0f} s, behind those of others; try again."
            raise ServiceError(503, message, "overloaded", retry_after_s=10) from error

    def check_taking(self) -> None:
        """Raise ServiceError where nothing more is taken."""
        if self.is_draining:
            message = "The service is shutting down; try again."
            raise ServiceError(503, message, "unavailable", retry_after_s=5)

    def _admit(self) -> None:
        self.check_taking()
        if self._num_open >= self._service.max_open:
            message = f"{self._num_open} requests are under way; try again."
            raise ServiceError(429, message, "overloaded", retry_after_s=1)
        self._num_open += 1

    async def _end(self, events: Events) -> None:
        self._num_open -= 1
        await events.aclose()


class _Listeners:
    """Who hears what happens to the versions, in bounds: each keeps a connection, and the registry is read for each."""

    def __init__(self, most: int) -> None:
        self._most, self._num = most, 0

    @property
    def num(self) -> int:
        """Streams under way."""
        return self._num

    def hear(self, events: AsyncGenerator[bytes, None]) -> Response:
        """The stream of `events`. Raises ServiceError where too many listen."""
        if self._num >= self._most:
            message = f"{self._num} clients listen to events; try again."
            raise ServiceError(429, message, "overloaded", retry_after_s=5)
        self._num += 1
        return ServerSentEvents(events, self._end)

    async def _end(self) -> None:
        self._num -= 1


def _add_inference(app: FastAPI, inference: _Inference) -> None:
    @app.post("/v1/completions", **described(replies.TextAnswer, *_REFUSALS, events=(replies.TextChunk, ErrorBody)))
    async def completions(ask: CompletionRequest, request: Request) -> Response:
        return await inference.complete(ask, request)

    @app.post(
        "/v1/chat/completions",
        **described(replies.ChatAnswer, *_REFUSALS, events=(replies.ChatChunk, ErrorBody)),
    )
    async def chat(ask: ChatRequest, request: Request) -> Response:
        return await inference.complete(ask, request)


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

    # A name may have slashes, as those of a hub's models do.
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
        # The answer too: FastAPI would look at each of its ids.
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


def _add_policy(
    app: FastAPI, service: Service, watch: EngineWatch, inference: _Inference, listeners: _Listeners
) -> None:
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
        inference.check_taking()
        last_id = request.headers.get("last-event-id")
        if service.registry is None:
            return listeners.hear(one_event(newest(await _states(watch)).policy, last_id, is_over))
        return listeners.hear(service.registry.events(last_id, is_over))

    # Also without a run: a checkpoint's model card may have examples.
    @app.get("/v1/policy/examples", **described(replies.PolicyExamples))
    async def examples() -> replies.PolicyExamples:
        task, prompts = await asyncio.to_thread(service.examples.single_turns)
        return replies.PolicyExamples(task=task, prompts=prompts)

    @app.get("/v1/policy/{version}", **described(replies.PolicyOfVersion, 400, 404, 503))
    async def one(version: _Number) -> replies.PolicyOfVersion:
        states = await _states(watch)
        policy = await _found(service, states, version, "version")
        return version_body(policy, states)


def _add_health(app: FastAPI, watch: EngineWatch, inference: _Inference) -> None:
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
        inference.check_taking()
        states = await _states(watch)
        if watch.is_stale:
            raise ServiceError(503, "No engine answers.", "unavailable", retry_after_s=5)
        return replies.Ready(status="ready", policy_version=newest(states).policy.version, num_engines=len(states))

    # SageMaker's and vLLM's word.
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
    """What is known of a version: to the engines, the registry, or the run directory. Raises ServiceError."""
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
        message = "No engine has that version, and the registry cannot be reached; try again."
        raise ServiceError(503, message, "unavailable", retry_after_s=5) from away
    raise ServiceError(404, f"There is no policy version {version} here.", "model_not_found", param=param)


def _version_header(writer: AnswerWriter) -> dict[str, str]:
    assert writer.policy is not None, "it has begun"
    return {"x-policy-version": str(writer.policy.version)}
