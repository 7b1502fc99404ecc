"""Writer of answers: converts the events of a job to OpenAI's objects, one answer or a stream of chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel

from actors.registry.records import POLICY, PolicyVersion
from deploy.requests.body import ChatRequest
from deploy.requests.planner import RequestPlan
from deploy.service.api.choice_text import ChoiceText, canvas_before, canvas_of, text_of_canvas
from deploy.service.api.replies import (
    CanvasReply,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatPart,
    Delta,
    DiffusionUsage,
    Reply,
    Slot,
    TextAnswer,
    TextChoice,
    TextChunk,
    TextLogprobs,
    TextPart,
    Usage,
)
from deploy.service.api.text_codec import TextCodec
from deploy.service.contract import Began, BlocksDone, CanvasSeen, Done, Event, Refused
from deploy.service.errors import ServiceError

Events = AsyncGenerator[Event, None]
Answer = TextAnswer | ChatAnswer
Part = TextPart | ChatPart


class AnswerWriter:
    """Convert the events of one request to its answer, whole or streamed."""

    def __init__(self, codec: TextCodec, plan: RequestPlan, run: str) -> None:
        """Create the writer of a planned request; `run` is the first part of the fingerprint."""
        self._codec, self._plan, self._run = codec, plan, run
        self._is_chat = isinstance(plan.body, ChatRequest)
        self._created = int(time.time())
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._begin(None)

    async def begin(self, events: Events) -> None:
        """Wait for the first event of a stream, so that an error still gets an HTTP status. Raises ServiceError."""
        first = await anext(events)
        if isinstance(first, Refused):
            await events.aclose()
            raise ServiceError.of(first)
        assert isinstance(first, Began), "it is the first event"
        self._begin(first.policy)

    async def answer(self, events: Events) -> Answer:
        """Return the complete answer. Raises ServiceError."""
        await self._read(events)
        usage, head = self._usage(), self._head()
        if self._is_chat:
            replies = [
                ChatChoice(index=index, message=Reply(role="assistant", content=choice.text), **self._end_of(choice))
                for index, choice in enumerate(self._choices)
            ]
            return ChatAnswer(object="chat.completion", choices=replies, usage=usage, **head)
        texts = [
            TextChoice(index=index, text=choice.text, **self._end_of(choice))
            for index, choice in enumerate(self._choices)
        ]
        return TextAnswer(object="text_completion", choices=texts, usage=usage, **head)

    async def chunks(self, events: Events) -> AsyncGenerator[bytes, None]:
        """Stream server-sent events, after `begin`. The last one is `[DONE]` or an error."""
        try:
            async with aclosing(events):
                if self._is_chat:
                    role = Delta(role="assistant", content="")
                    yield b"".join(self._chunk([self._part(index, role)]) for index in range(len(self._choices)))
                if self._plan.body.shows_canvas:
                    yield b"".join(self._chunk([part]) for part in self._empty())
                # The chunks of one event are sent in one write.
                last = b""
                async for event in events:
                    if isinstance(event, Refused):
                        raise ServiceError.of(event)
                    said = b"".join(self._chunk([part]) for part in self._parts(event))
                    if all(choice.is_finished for choice in self._choices):
                        last = said
                        break
                    if said:
                        yield said
            if self._plan.body.includes_usage:
                last += self._chunk([], usage=self._usage())
            yield last + b"data: [DONE]\n\n"
        except ServiceError as error:
            yield _data(error.body)
        except Exception:
            yield _data(ServiceError(500, "The service failed; the failure is in its log.").body)
            raise

    def _empty(self) -> Iterator[Part]:
        """Return every canvas before its first denoise step."""
        for index, request in enumerate(self._plan.requests):
            slots = canvas_before(self._codec, request)
            yield self._part(index, Delta(content=text_of_canvas(slots)), diffusion=self._canvas(index, slots, 0))

    def _parts(self, event: Event) -> list[Part]:
        """Convert an event to parts of a chunk; none if there is nothing new."""
        if isinstance(event, CanvasSeen):
            slots = canvas_of(self._codec, event.progress, self._plan.num_slots)
            num_steps = event.progress.num_steps
            shown = Delta(content=text_of_canvas(slots))
            return [self._part(event.choice, shown, diffusion=self._canvas(event.choice, slots, num_steps))]
        assert isinstance(event, BlocksDone | Done), "other events come first or last"
        choice = self._choices[event.choice]
        if choice.is_finished:
            return []
        new = choice.take(event)
        if self._plan.body.shows_canvas:
            return [self._last_canvas(event.choice, choice)] if choice.is_finished else []
        parts = [self._part(event.choice, Delta(content=new))] if new else []
        return [*parts, self._part(event.choice, Delta(), **self._end_of(choice))] if choice.is_finished else parts

    def _last_canvas(self, index: int, choice: ChoiceText) -> Part:
        num_steps = choice.num_forwards // self._plan.num_forwards_of_step
        end = self._end_of(choice)
        canvas = self._canvas(index, choice.canvas(), num_steps, **dict(end.get("diffusion", ())))
        return self._part(index, Delta(content=choice.text), **end | {"diffusion": canvas})

    def _part(self, index: int, delta: Delta, **end: Any) -> Part:
        """Create a choice of a chunk."""
        said = {"index": index, "logprobs": None, "finish_reason": None} | end
        return ChatPart(delta=delta, **said) if self._is_chat else TextPart(text=delta.content or "", **said)

    def _canvas(self, index: int, slots: list[Slot], num_steps: int, **step_map: Any) -> CanvasReply:
        return CanvasReply(step=num_steps, num_steps=self._plan.num_steps(index), slots=slots, **step_map)

    def _end_of(self, choice: ChoiceText) -> dict[str, Any]:
        """Return the fields of a finished choice."""
        logprobs: TextLogprobs | ChatLogprobs | None = None
        if self._plan.body.returns_logprobs:
            logprobs = choice.chat_logprobs() if self._is_chat else choice.text_logprobs()
        said = {"finish_reason": choice.finish_reason, "logprobs": logprobs}
        return said | ({"diffusion": choice.step_map()} if self._plan.body.diffusion.return_step_map else {})

    def _chunk(self, choices: list[Part], usage: Usage | None = None) -> bytes:
        # In OpenAI's chunks it is null, except in the last one.
        said = self._head() | {"choices": choices} | ({"usage": usage} if self._plan.body.includes_usage else {})
        if self._is_chat:
            return _data(ChatChunk(object="chat.completion.chunk", **said))
        return _data(TextChunk(object="text_completion", **said))

    def _head(self) -> dict[str, Any]:
        """Return the fields that every object has. The fingerprint identifies the weights."""
        policy = self.policy
        assert policy is not None, "the job has begun"
        digest = f"-{policy.manifest_digest[:12]}" if policy.manifest_digest else ""
        return {
            "id": self._id,
            "created": self._created,
            "model": self._plan.body.model or POLICY,
            "system_fingerprint": f"{self._run}-v{policy.version}{digest}",
            "policy_version": policy.version,
        }

    async def _read(self, events: Events) -> None:
        """Read all events of the answer. Raises ServiceError."""
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Refused):
                    raise ServiceError.of(event)
                if isinstance(event, Began):
                    # A restarted job discards the events before.
                    self._begin(event.policy)
                elif not isinstance(event, CanvasSeen):
                    self._choices[event.choice].take(event)
                    if all(choice.is_finished for choice in self._choices):
                        break

    def _begin(self, policy: PolicyVersion | None) -> None:
        self.policy = policy
        """The version that answers; None before `begin`."""
        self._choices = [ChoiceText(self._codec, self._plan, index) for index in range(len(self._plan.requests))]

    def _usage(self) -> Usage:
        """Count tokens and forwards."""
        num_tokens = sum(choice.num_tokens for choice in self._choices)
        num_forwards = sum(choice.num_forwards for choice in self._choices)
        return Usage(
            prompt_tokens=self._plan.num_prompt_tokens,
            completion_tokens=num_tokens,
            total_tokens=self._plan.num_prompt_tokens + num_tokens,
            diffusion=DiffusionUsage(
                num_forwards=num_forwards,
                num_blocks=sum(choice.num_blocks for choice in self._choices),
                tokens_per_forward=round(num_tokens / num_forwards, 3) if num_forwards else 0.0,
            ),
        )


def as_json(body: BaseModel) -> bytes:
    """Encode a body, without the fields that were not set."""
    return body.model_dump_json(exclude_unset=True).encode()


def _data(body: BaseModel) -> bytes:
    return b"data: " + as_json(body) + b"\n\n"
