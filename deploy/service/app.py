"""The HTTP application around an engine. It knows no Ray."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.service.engine import Generation, InvalidPromptError, PolicyEngine
from deploy.service.errors import ServiceError, error_response, install_handlers
from deploy.service.follower import FollowerStatus
from deploy.service.schemas import (
    MAX_CHOICES,
    Choice,
    CompletionRequest,
    CompletionResponse,
    ErrorResponse,
    HealthResponse,
    PolicyResponse,
    ScoreResponse,
    Usage,
)

OPEN_PATH = "/health"
MAX_BODY_BYTES = 256 * 1024
MAX_PENDING = 64
_ANSWER_TIMEOUT_S = 120.0


def digest_of(token: str) -> bytes:
    """What the service keeps of its token: enough to recognise it, useless to whoever reads the service's state."""
    return hashlib.sha256(token.encode()).digest()


class Gate:
    """Lets nothing through without the token, except to `/health`, and no large body. It runs before any parsing."""

    def __init__(self, app: ASGIApp, token_digest: bytes) -> None:
        self._app, self._token_digest = app, token_digest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401; a body beyond the limit ends in 413 where it is read."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["path"] != OPEN_PATH and not self._has_token(scope):
            response = error_response(401, "Send the token: `Authorization: Bearer TOKEN`.", "invalid_api_key")
            await response(scope, receive, send)
        else:
            await self._app(scope, _limited(receive), send)

    def _has_token(self, scope: Scope) -> bool:
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(sent) != 1 or not sent[0].lower().startswith(b"bearer "):
            return False
        return hmac.compare_digest(hashlib.sha256(sent[0][7:].strip()).digest(), self._token_digest)


def _limited(receive: Receive) -> Receive:
    """Stops a body that is too large while it comes, whatever length it announces."""
    num_bytes = 0

    async def limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, f"The body exceeds {MAX_BODY_BYTES} bytes.")
        return message

    return limited


class Queue:
    """Work for the engine: one request at a time, a bounded number waiting, never on the event loop's thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._slots = threading.BoundedSemaphore(MAX_PENDING)

    async def run(self, work: Callable[[], Generation]) -> Generation:
        """The result of `work`. Raises ServiceError when the queue is full or the answer takes too long."""
        if not self._slots.acquire(blocking=False):
            raise ServiceError(503, f"{MAX_PENDING} requests are waiting; try again.", "overloaded")
        future: Future[Generation] = self._pool.submit(work)
        # The slot is free when the work has ended, which may be after its client has gone.
        future.add_done_callback(lambda _: self._slots.release())
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), _ANSWER_TIMEOUT_S)
        except TimeoutError as error:
            raise ServiceError(503, f"No answer within {_ANSWER_TIMEOUT_S:.0f} s; try again.", "timeout") from error


def create_app(
    engine: PolicyEngine, run: str, token_digest: bytes, follower_status: Callable[[], FollowerStatus]
) -> FastAPI:
    """The application that answers from `engine` under the model name `run`."""
    # The interactive documentation pages load scripts from elsewhere; the schema itself is behind the token.
    app = FastAPI(
        title="d1",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={status: {"model": ErrorResponse} for status in (400, 401, 404, 413, 500, 503)},
    )
    app.add_middleware(Gate, token_digest=token_digest)
    install_handlers(app)
    queue = Queue()

    @app.get(OPEN_PATH)
    async def health() -> HealthResponse:
        status = follower_status()
        return HealthResponse(
            status="ok" if status.registry_reachable else "degraded",
            policy_version=engine.policy.version,
            registry_reachable=status.registry_reachable,
            follower_errors=status.num_errors,
        )

    @app.get("/v1/policy")
    async def policy() -> PolicyResponse:
        served = engine.policy
        return PolicyResponse(
            run=run,
            policy_version=served.version,
            round=served.round,
            phase=served.phase,
            score=ScoreResponse.of(engine.scored),
            num_swaps=engine.num_swaps,
            last_follower_error=follower_status().last_error,
        )

    @app.post("/v1/completions")
    async def completions(request: CompletionRequest) -> CompletionResponse:
        _check(request, run)
        try:
            generation = await queue.run(
                lambda: engine.complete(
                    request.prompts,
                    max_tokens=request.max_tokens,
                    temperature=request.temperature,
                    seed=request.seed,
                    num_choices=request.n,
                )
            )
        except InvalidPromptError as error:
            raise ServiceError(400, str(error), "invalid_prompt") from error
        return _response(generation, run)

    return app


def _check(request: CompletionRequest, run: str) -> None:
    if request.model not in (None, run):
        raise ServiceError(404, f"This service has one model, {run}.", "model_not_found")
    if len(request.prompts) * request.n > MAX_CHOICES:
        raise ServiceError(400, f"A request has at most {MAX_CHOICES} choices: `n` times its prompts.")


def _response(generation: Generation, run: str) -> CompletionResponse:
    policy = generation.policy
    num_completion_tokens = sum(text.num_tokens for text in generation.texts)
    fingerprint = f"{run}-v{policy.version}" + (f"-{policy.manifest_digest[:12]}" if policy.manifest_digest else "")
    return CompletionResponse(
        id=f"cmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=run,
        choices=[
            Choice(index=index, text=text.text, finish_reason="length" if text.is_cut else "stop")
            for index, text in enumerate(generation.texts)
        ],
        usage=Usage(
            prompt_tokens=generation.num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=generation.num_prompt_tokens + num_completion_tokens,
        ),
        system_fingerprint=fingerprint,
        policy_version=policy.version,
    )
