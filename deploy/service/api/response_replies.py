"""The bodies of answers of `POST /v1/responses`, and the events of its streams."""

from __future__ import annotations

from typing import Any, Literal

from deploy.service.api.replies import Body, DiffusionUsage


class OutputText(Body):
    """A text."""

    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[None]


class OutputMessage(Body):
    """What the policy says."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class CachedTokens(Body):
    """None: a canvas has no cache of prompts."""

    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokens(Body):
    """None by itself."""

    reasoning_tokens: int


class ResponseUsage(Body):
    """Tokens, and the forwards that they took."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int
    diffusion: DiffusionUsage


class Incomplete(Body):
    """Why a text ended early."""

    reason: Literal["max_output_tokens"]


class Response(Body):
    """The answer. What d1 does not have is as OpenAI's says that it is not used."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: list[OutputMessage]
    usage: ResponseUsage | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    error: None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    tool_choice: Literal["none"]
    tools: list[None]
    truncation: Literal["disabled"]
    system_fingerprint: str
    policy_version: int
    """The version that made all of it."""


class ResponseEvent(Body):
    """An event of a stream; which fields it has is told by its type, as OpenAI has it."""

    type: str
    sequence_number: int
    response: Response | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: OutputMessage | None = None
    part: OutputText | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[None] | None = None
    error: dict[str, Any] | None = None
    message: str | None = None
    code: str | None = None
