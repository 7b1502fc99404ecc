"""Fake service for the page: the API's contract with scripted answers, without a policy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.responses import Response

from deploy.page.routes import page_router

KEY = "a-key-of-the-tests"
_TICK_S = 0.005
OPEN = 10**9
TEXTS = ("The", " sum", " of", " 2", " and", " 3", " is", " 5", ".")
STEPS = (3, 2, 0, 1, 1, 0, 2, 3, 4)

Json = dict[str, Any]


def slots(texts: Sequence[str], steps: Sequence[int], done: int) -> list[Json]:
    """Return a canvas after `done` steps. `steps` is the step at which each slot is committed."""
    return [
        {"text": text, "masked": False, "step": step, "confidence": round(0.99 - 0.07 * (index % 9), 3)}
        if step < done
        else {"text": "", "masked": True, "step": -1, "confidence": None}
        for index, (text, step) in enumerate(zip(texts, steps, strict=True))
    ]


def frames(texts: Sequence[str], steps: Sequence[int]) -> list[Json]:
    """Return the canvases of a completion, from all masks to none."""
    num_steps = max(steps) + 1
    return [{"step": done, "num_steps": num_steps, "slots": slots(texts, steps, done)} for done in range(num_steps + 1)]


class FakeService:
    """The service that the page talks to. A test changes it while it runs."""

    def __init__(self) -> None:
        self.models = ["policy", "last", "policy@v000011", "policy@v000012", "base"]
        self.answers: dict[str, list[Json]] = {}
        """The canvases by model. A model without an entry gets those of `policy`."""
        self.text: str | None = None
        """The whole text of an answer. None: the text of the slots."""
        self.allowed = OPEN
        """How many canvases each stream may have sent so far."""
        self.delay_s = 0.0
        self.breaks_after: int | None = None
        self.breaks_with: Json | None = None
        self.refusal: tuple[int, Json, dict[str, str]] | None = None
        self.requests: list[Json] = []
        self.paths: list[str] = []
        self.queries: list[str] = []
        self.num_gone = 0
        self.examples: Json = {"task": "sums", "prompts": ["1 + 2", "2 + 2"]}
        self.policy: Json = {
            "run": "tiny",
            "policy_version": 12,
            "round": 11,
            "phase": "rl",
            "checksum": "ab" * 32,
            "score": {
                "policy_version": 12,
                "num_correct": 737,
                "num_problems": 1000,
                "accuracy": 0.737,
                "interval_95": [0.709, 0.763],
            },
            "lag": {"published": 12, "behind": 0},
            "aliases": {"policy": 12, "base": 1},
            "pinned": None,
            "paused": False,
            "num_swaps": 11,
            "refused": [],
            "last_error": None,
        }
        self.policy_events: list[tuple[str, Json]] = []
        self.last_event_ids: list[str | None] = []
        self.cuts_policy_events = False
        self.is_closing = False

    def app(self) -> FastAPI:
        """Build the application."""
        app = FastAPI()
        app.include_router(page_router())

        @app.middleware("http")
        async def gate(request: Request, call_next: Any) -> Response:
            self.paths.append(request.url.path)
            self.queries.append(request.url.query)
            is_open = request.url.path == "/" or request.url.path.startswith("/assets/")
            if not is_open and request.headers.get("authorization") != f"Bearer {KEY}":
                return _error(401, "No such key.", "invalid_api_key")
            return await call_next(request)

        @app.get("/v1/models")
        async def models() -> Json:
            return {
                "object": "list",
                "data": [{"id": name, "object": "model", "owned_by": "d1"} for name in self.models],
            }

        @app.post("/v1/chat/completions")
        @app.post("/v1/completions")
        async def complete(request: Request) -> Response:
            body = await request.json()
            self.requests.append({"path": request.url.path, **body})
            if self.refusal is not None:
                status, error, headers = self.refusal
                return JSONResponse({"error": error}, status_code=status, headers=headers)
            return StreamingResponse(self._stream(body), media_type="text/event-stream")

        self._add_policy(app)
        return app

    async def _stream(self, body: Json) -> AsyncIterator[str]:
        canvases = self.answers.get(body["model"]) or self.answers["policy"]
        about = {
            "id": "cmpl-1",
            "model": body["model"],
            "policy_version": 1 if body["model"] == "base" else self.policy["policy_version"],
        }
        sent = 0
        try:
            for sent, canvas in enumerate(canvases):
                while sent >= self.allowed and not self.is_closing:
                    await asyncio.sleep(_TICK_S)
                if sent == self.breaks_after:
                    if self.breaks_with is not None:
                        yield _data({"error": self.breaks_with})
                    return
                await asyncio.sleep(self.delay_s)
                text = "".join("\u2591" if slot["masked"] else slot["text"] for slot in canvas["slots"])
                finish = "stop" if sent == len(canvases) - 1 else None
                text = self.text if finish and self.text is not None else text
                said = {"delta": {"content": text}} if "messages" in body else {"text": text}
                yield _data({**about, "choices": [{"index": 0, **said, "finish_reason": finish, "diffusion": canvas}]})
        except asyncio.CancelledError:
            self.num_gone += 1
            raise
        num_slots = len(canvases[-1]["slots"])
        num_forwards = len(canvases) - 1
        diffusion = {
            "num_forwards": num_forwards,
            "num_blocks": 1,
            "tokens_per_forward": num_slots / max(1, num_forwards),
        }
        usage = {
            "prompt_tokens": 9,
            "completion_tokens": num_slots,
            "total_tokens": 9 + num_slots,
            "diffusion": diffusion,
        }
        yield _data({**about, "choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    def _add_policy(self, app: FastAPI) -> None:
        @app.get("/v1/policy")
        async def policy() -> Json:
            return self.policy

        @app.get("/v1/policy/examples")
        async def examples() -> Json:
            return self.examples

        @app.get("/v1/policy/events")
        async def events(request: Request) -> Response:
            last = request.headers.get("last-event-id")
            self.last_event_ids.append(last)
            return StreamingResponse(self._policy_events(int(last or 0)), media_type="text/event-stream")

    async def _policy_events(self, after: int) -> AsyncIterator[str]:
        yield ": here\n\n"
        while not (self.cuts_policy_events or self.is_closing):
            for name, event in self.policy_events[after:]:
                after += 1
                yield f"id: {after}\nevent: {name}\n{_data(event)}"
            await asyncio.sleep(_TICK_S)
        self.cuts_policy_events = False


def _data(value: Json) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _error(status: int, message: str, code: str) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status)


@contextlib.contextmanager
def listening(service: FakeService) -> Iterator[str]:
    """Serve on a free port of loopback, in a thread of this process."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(service.app(), log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(_TICK_S)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            service.is_closing = server.should_exit = True
            thread.join(10)
