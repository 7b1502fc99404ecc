"""The writer of `POST /v1/responses`: the events of a job as a response, whole or streamed."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, Literal

from deploy.requests.planner import RequestPlan
from deploy.requests.responses import ResponsesRequest
from deploy.service.api.choice_text import ChoiceText
from deploy.service.api.response_replies import (
    CachedTokens,
    Incomplete,
    OutputMessage,
    OutputText,
    ReasoningTokens,
    Response,
    ResponseEvent,
    ResponseUsage,
)
from deploy.service.api.text_codec import TextCodec
from deploy.service.api.writer import Events, Writer, as_json
from deploy.service.contract import BlocksDone, Done, Refused
from deploy.service.errors import ServiceError

_Status = Literal["in_progress", "completed", "incomplete"]


class ResponseWriter(Writer):
    """The answer to one request, as its events come."""

    def __init__(self, codec: TextCodec, plan: RequestPlan, ask: ResponsesRequest, model: str, run: str) -> None:
        """Write an answer to `ask`, of `model`; the fingerprint begins with `run`."""
        super().__init__(codec, plan)
        self._ask, self._model, self._run = ask, model, run
        self._id, self._item_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._num_events = 0

    async def answer(self, events: Events) -> Response:
        """The whole answer. Raises ServiceError."""
        await self._read(events)
        return self._response(self._status)

    async def chunks(self, events: Events) -> AsyncGenerator[bytes, None]:
        """A stream of server-sent events, after `begin`. It ends with the whole response, or with an error."""
        try:
            async with aclosing(events):
                yield b"".join(self._opening())
                async for event in events:
                    if isinstance(event, Refused):
                        raise ServiceError.of(event)
                    assert isinstance(event, BlocksDone | Done), "canvases were not asked for"
                    if new := self._text.take(event):
                        yield self._event("output_text.delta", **self._where(), delta=new, logprobs=[])
                    if self._text.is_finished:
                        break
            yield b"".join(self._closing())
        except ServiceError as error:
            yield self._error(error)
        except Exception:
            yield self._error(ServiceError(500, "The service failed; the failure is in its log."))
            raise

    @property
    def _text(self) -> ChoiceText:
        return self._choices[0]

    @property
    def _status(self) -> _Status:
        return "completed" if self._text.finish_reason == "stop" else "incomplete"

    def _opening(self) -> Iterator[bytes]:
        response, part = self._response("in_progress"), self._part("")
        yield self._event("created", response=response)
        yield self._event("in_progress", response=response)
        yield self._event("output_item.added", output_index=0, item=self._item("in_progress", []))
        yield self._event("content_part.added", **self._where(), part=part)

    def _closing(self) -> Iterator[bytes]:
        part, status = self._part(self._text.text), self._status
        yield self._event("output_text.done", **self._where(), text=self._text.text, logprobs=[])
        yield self._event("content_part.done", **self._where(), part=part)
        yield self._event("output_item.done", output_index=0, item=self._item(status, [part]))
        yield self._event(status, response=self._response(status))

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _part(self, text: str) -> OutputText:
        return OutputText(type="output_text", text=text, annotations=[], logprobs=[])

    def _item(self, status: _Status, content: list[OutputText]) -> OutputMessage:
        return OutputMessage(type="message", id=self._item_id, role="assistant", status=status, content=content)

    def _response(self, status: _Status) -> Response:
        ask, is_over = self._ask, status != "in_progress"
        return Response(
            id=self._id,
            object="response",
            created_at=self._created,
            status=status,
            model=self._model,
            output=[self._item(status, [self._part(self._text.text)])] if is_over else [],
            usage=self._response_usage() if is_over else None,
            incomplete_details=Incomplete(reason="max_output_tokens") if status == "incomplete" else None,
            instructions=ask.instructions,
            max_output_tokens=ask.most_tokens,
            temperature=ask.temperature,
            top_p=ask.top_p,
            error=None,
            metadata=ask.metadata,
            parallel_tool_calls=False,
            previous_response_id=None,
            store=False,
            tool_choice="none",
            tools=[],
            truncation="disabled",
            system_fingerprint=self._fingerprint(self._run),
            policy_version=self._begun().version,
        )

    def _response_usage(self) -> ResponseUsage:
        usage = self._usage()
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=CachedTokens(cached_tokens=0, cache_write_tokens=0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=ReasoningTokens(reasoning_tokens=0),
            total_tokens=usage.total_tokens,
            diffusion=usage.diffusion,
        )

    def _error(self, error: ServiceError) -> bytes:
        said = error.body.error
        return self._event("error", error=said.model_dump(), message=said.message, code=said.code)

    def _event(self, kind: str, **fields: Any) -> bytes:
        name = kind if kind == "error" else f"response.{kind}"
        event = ResponseEvent(type=name, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return f"event: {name}\ndata: ".encode() + as_json(event) + b"\n\n"
