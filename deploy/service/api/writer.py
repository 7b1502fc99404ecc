"""The writer: the events of a job as OpenAI's objects, one answer or a stream of chunks."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from actors.registry.registry import PolicyVersion
from deploy.requests.planner import Plan
from deploy.service.api.choice_text import ChoiceText, canvas_before, canvas_of, text_of_canvas
from deploy.service.api.text_codec import TextCodec
from deploy.service.contract import Began, BlocksDone, CanvasSeen, Done, Event, Refused
from deploy.service.errors import ServiceError

Events = AsyncGenerator[Event, None]


class AnswerWriter:
    """The answer to one request, as its events come."""

    def __init__(self, codec: TextCodec, plan: Plan, model: str, run: str, *, is_chat: bool) -> None:
        """Write an answer.

        Args:
            codec: how the policy writes.
            plan: what was asked.
            model: the model's name in the answer.
            run: what the fingerprint begins with.
            is_chat: whether it is one of `/v1/chat/completions`.
        """
        self._codec, self._plan, self._model, self._run, self._is_chat = codec, plan, model, run, is_chat
        self._id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self.policy: PolicyVersion | None = None
        """The version that answers; None before it has begun."""
        self._begin(None)

    async def answer(self, events: Events) -> dict[str, Any]:
        """The whole answer. Raises ServiceError."""
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Refused):
                    raise ServiceError.of(event)
                if isinstance(event, Began):
                    # A second time, what came before is void.
                    self._begin(event.policy)
                elif not isinstance(event, CanvasSeen):
                    self._choices[event.choice].take(event)
                    if all(choice.is_finished for choice in self._choices):
                        break
        choices = [self._whole(index, choice) for index, choice in enumerate(self._choices)]
        return self._object("chat.completion" if self._is_chat else "text_completion", choices) | {
            "usage": self._usage()
        }

    async def begin(self, events: Events) -> None:
        """Wait for the version that answers a stream: an error still has its status then. Raises ServiceError."""
        first = await anext(events)
        if isinstance(first, Refused):
            await events.aclose()
            raise ServiceError.of(first)
        assert isinstance(first, Began), "nothing comes before it"
        self._begin(first.policy)

    async def chunks(self, events: Events) -> AsyncGenerator[bytes, None]:
        """A stream of server-sent events, after `begin`. It ends with [DONE], or with an error and nothing after."""
        try:
            async with aclosing(events):
                if self._is_chat:
                    roles = (
                        self._part(index, {"role": "assistant", "content": ""}) for index in range(len(self._choices))
                    )
                    yield b"".join(self._chunk([role]) for role in roles)
                if self._plan.shows_canvas:
                    yield b"".join(self._chunk([part]) for part in self._empty())
                # What comes of one event goes out together: each write costs both sides a wake-up.
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
            if self._plan.includes_usage:
                last += self._chunk([], usage=self._usage())
            yield last + b"data: [DONE]\n\n"
        except ServiceError as error:
            yield _data(error.body)
        except Exception:
            yield _data(ServiceError(500, "The service failed; the failure is in its log.").body)
            raise

    def _begin(self, policy: PolicyVersion | None) -> None:
        self.policy = policy
        self._choices = [ChoiceText(self._codec, self._plan) for _ in self._plan.requests]

    def _empty(self) -> Iterator[dict[str, Any]]:
        """Every canvas before its first denoise step."""
        for index, request in enumerate(self._plan.requests):
            slots = canvas_before(self._codec, request)
            yield self._canvas(index, slots, text_of_canvas(slots), 0)

    def _parts(self, event: Event) -> list[dict[str, Any]]:
        """What a chunk says of an event; nothing where there is nothing new."""
        if isinstance(event, CanvasSeen):
            slots, num_steps = canvas_of(self._codec, event.progress), event.progress.num_steps
            return [self._canvas(event.choice, slots, text_of_canvas(slots), num_steps)]
        assert isinstance(event, BlocksDone | Done), "the others come first or last"
        choice = self._choices[event.choice]
        if choice.is_finished:
            return []
        new = choice.take(event)
        if self._plan.shows_canvas:
            if not choice.is_finished:
                return []
            num_steps = choice.num_forwards // (2 if self._plan.params.cfg_scale else 1)
            part = self._canvas(event.choice, choice.canvas(), choice.text, num_steps)
            part["diffusion"] |= self._step_map(choice)
            return [part | {"finish_reason": choice.finish_reason}]
        parts = [self._part(event.choice, {"content": new})] if new else []
        if choice.is_finished:
            last = self._part(event.choice, {}) | {"finish_reason": choice.finish_reason}
            parts.append(last | ({"diffusion": self._step_map(choice)} if self._plan.returns_step_map else {}))
        return parts

    def _part(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        """A choice of a chunk."""
        said = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        return {"index": index, **said, "logprobs": None, "finish_reason": None}

    def _canvas(self, index: int, slots: list[dict[str, Any]], text: str, num_steps: int) -> dict[str, Any]:
        params = self._plan.params
        is_known = params.threshold is None and str(params.schedule) in ("quota", "random", "left_to_right")
        frame = {"step": num_steps, "num_steps": params.num_denoise_steps if is_known else None, "slots": slots}
        return self._part(index, {"content": text}) | {"diffusion": frame}

    def _whole(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": choice.text}} if self._is_chat else {"text": choice.text}
        whole = {"index": index, **said, "logprobs": None, "finish_reason": choice.finish_reason}
        return whole | ({"diffusion": self._step_map(choice)} if self._plan.returns_step_map else {})

    def _step_map(self, choice: ChoiceText) -> dict[str, Any]:
        return choice.diffusion() if self._plan.returns_step_map else {}

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        # OpenAI's chunks have null there but for the last.
        return _data(self._object(kind, choices) | ({"usage": usage} if self._plan.includes_usage else {}))

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        policy = self.policy
        assert policy is not None, "nothing is written before it has begun"
        digest = f"-{policy.manifest_digest[:12]}" if policy.manifest_digest else ""
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "system_fingerprint": f"{self._run}-v{policy.version}{digest}",
            "policy_version": policy.version,
        }

    def _usage(self) -> dict[str, Any]:
        num_tokens = sum(choice.num_tokens for choice in self._choices)
        num_forwards = sum(choice.num_forwards for choice in self._choices)
        return {
            "prompt_tokens": self._plan.num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self._plan.num_prompt_tokens + num_tokens,
            "diffusion": {
                "num_forwards": num_forwards,
                "num_blocks": sum(choice.num_blocks for choice in self._choices),
                "tokens_per_forward": round(num_tokens / num_forwards, 3) if num_forwards else 0.0,
            },
        }


def _data(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
