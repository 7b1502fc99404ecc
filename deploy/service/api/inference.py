"""Completion requests: admission, planning, and the answer or stream."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from structlog.contextvars import get_contextvars

from actors.registry.records import BASE, BEST, POLICY
from deploy.requests.body import ChatRequest, CompletionBody, CompletionRequest
from deploy.requests.families import AnyDefaults, AnyRequest, num_slots_of
from deploy.requests.planner import Planner, RequestPlan
from deploy.service.api import replies
from deploy.service.api.openapi import described
from deploy.service.api.server_sent_events import ServerSentEvents
from deploy.service.api.text_codec import TextCodec
from deploy.service.api.writer import AnswerWriter, as_json
from deploy.service.contract import Backend, Job
from deploy.service.errors import ErrorBody, ServiceError
from deploy.service.failover import with_failover
from deploy.service.gateway.access import MAX_BODY_BYTES

GRAMMAR_TIMEOUT_S = 60.0
"""Maximum time that a request waits for its grammar, in seconds."""
# A body that is tokenized in the time that a thread takes to start.
_SHORT_BYTES = 2048
_REFUSALS = (400, 404, 408, 413, 503)
_VERSION = re.compile(r"policy@v(\d{1,9})")
_LAST = "last"
"""Name of the newest checkpoint on the command line; here an alias of `policy`."""


class ServicePlanner(Planner):
    """Planner of a service, which also resolves model names and creates jobs."""

    def __init__(
        self,
        codec: TextCodec,
        defaults: AnyDefaults,
        name: str,
        timeout_s: float = 120.0,
        served_names: Sequence[str] = (),
    ) -> None:
        """Create a planner. The run's `name` and `served_names` are aliases of `policy`."""
        super().__init__(codec, defaults)
        self.name, self._timeout_s = name, timeout_s
        # In a run that is called `base`, that name still means the version that its rounds began with.
        self.aliases = tuple(one for one in dict.fromkeys((_LAST, name, *served_names)) if one not in (BASE, BEST))
        """Aliases of `policy`."""

    def wanted(self, model: str | None) -> str | int:
        """Return the alias or the version that a model name means. Raises ServiceError for an unknown name."""
        # An empty name counts as absent, as in vLLM.
        if not model or model in (POLICY, *self.aliases):
            return POLICY
        if model in (BASE, BEST):
            return model
        match = _VERSION.fullmatch(str(model))
        if match is None:
            names = f"{', '.join((POLICY, BASE, BEST, 'policy@vNNNNNN', *self.aliases[1:-1]))} and {self.aliases[-1]}"
            message = f"This service has the models {names}."
            raise ServiceError(404, message, "model_not_found", param="model")
        return int(match[1])

    def plan(self, body: CompletionBody, names: Mapping[str, str] | None = None) -> RequestPlan:
        """Plan a request. Raises RequestError or ServiceError."""
        self.wanted(body.model)
        try:
            return super().plan(body, names)
        except ServiceError as error:
            # `check` does not know in which field the prompt is.
            error.param = error.param or body.prompt_field
            raise

    def job(self, plan: RequestPlan) -> Job:
        """Create the engines' job for a planned request."""
        body = plan.body
        return Job(
            requests=dict(enumerate(plan.requests)),
            wanted=self.wanted(body.model),
            shows_canvas=body.shows_canvas,
            # An answer that is sent as a whole needs finished blocks only if it may end before the canvas does.
            tells_blocks=bool(body.stream or body.stops or plan.most_tokens < plan.num_slots),
            timeout_s=self._timeout_s,
            request_id=str(get_contextvars().get("request_id", "")),
        )

    def check(self, request: AnyRequest) -> None:
        """See `Planner`. A prompt that is too long gets OpenAI's code, with which clients shorten it."""
        config = self._codec.config
        num_tokens, room = len(request.prompt_ids), config.max_sequence_length - num_slots_of(request, config)
        if num_tokens > room:
            message = f"The prompt has {num_tokens} tokens; this policy reads at most {room}."
            raise ServiceError(400, message, "context_length_exceeded")
        super().check(request)


class Places:
    """Limited number of requests of one kind in progress."""

    def __init__(self, most: int, message: str, retry_after_s: int) -> None:
        """Allow `most`; `message` explains a refusal, with `{num}` for the number in progress."""
        self._most, self._message, self._retry_after_s = most, message, retry_after_s
        self.num = 0

    def take(self) -> None:
        """Take a place. Raises ServiceError if there is none."""
        if self.num >= self._most:
            message = self._message.format(num=self.num)
            raise ServiceError(429, message, "overloaded", retry_after_s=self._retry_after_s)
        self.num += 1

    async def free(self) -> None:
        """Free a place."""
        self.num -= 1


class Inference:
    """Answers to completion requests."""

    def __init__(self, backend: Backend, codec: TextCodec, planner: ServicePlanner, max_open: int) -> None:
        """Answer with the engines of `backend`, at most `max_open` requests at a time."""
        self._backend, self._codec, self._planner = backend, codec, planner
        self.places = Places(max_open, "{num} requests are in progress; try again.", retry_after_s=1)
        # A grammar takes up to seconds of a core. Their own threads, so that other requests do not wait for them.
        self._grammar_makers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")
        self.is_draining = False
        """Whether new requests are refused, and streams of events end."""

    def check_accepting(self) -> None:
        """Raise ServiceError if the service accepts no more requests."""
        if self.is_draining:
            message = "The service is shutting down; try again."
            raise ServiceError(503, message, "unavailable", retry_after_s=5)

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        """Return the answer to a body: one object, or a stream."""
        self.check_accepting()
        self.places.take()
        is_streamed = False
        try:
            plan = await self._plan(body, request)
            writer = AnswerWriter(self._codec, plan, self._planner.name)
            events = with_failover(self._backend, self._planner.job(plan), may_restart=not body.stream)
            if not body.stream:
                answer = as_json(await writer.answer(events))
                return Response(answer, headers=_version_header(writer), media_type="application/json")
            await writer.begin(events)
            is_streamed = True

            async def end() -> None:
                await self.places.free()
                await events.aclose()

            return ServerSentEvents(writer.chunks(events), end, headers=_version_header(writer))
        finally:
            if not is_streamed:
                await self.places.free()

    async def _plan(self, body: CompletionBody, request: Request) -> RequestPlan:
        is_short = int(request.headers.get("content-length", MAX_BODY_BYTES)) <= _SHORT_BYTES
        if body.structure is not None and not self._codec.has_grammar(body.structure):
            return await self._plan_with_grammar(body)
        if is_short and body.structure is None:
            return self._planner.plan(body)
        # Tokenizing a long text, or applying a grammar to a canvas, would delay every stream.
        return await asyncio.to_thread(self._planner.plan, body)

    async def _plan_with_grammar(self, body: CompletionBody) -> RequestPlan:
        making = asyncio.get_running_loop().run_in_executor(self._grammar_makers, self._planner.plan, body)
        try:
            async with asyncio.timeout(GRAMMAR_TIMEOUT_S):
                return await making
        except TimeoutError as error:
            message = f"Its grammar was not ready in {GRAMMAR_TIMEOUT_S:.0f} s, behind other requests; try again."
            raise ServiceError(503, message, "overloaded", retry_after_s=10) from error


def add_completions(app: FastAPI, inference: Inference) -> None:
    """Add the routes of completions and chats."""

    @app.post("/v1/completions", **described(replies.TextAnswer, *_REFUSALS, events=(replies.TextChunk, ErrorBody)))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await inference.complete(body, request)

    chat_events = (replies.ChatChunk, ErrorBody)

    @app.post("/v1/chat/completions", **described(replies.ChatAnswer, *_REFUSALS, events=chat_events))
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await inference.complete(body, request)


def _version_header(writer: AnswerWriter) -> dict[str, str]:
    assert writer.policy is not None, "it has begun"
    return {"x-policy-version": str(writer.policy.version)}
