"""Bodies of answers: pydantic models, from which the OpenAPI schema is generated."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from deploy.service.contract import RefusedVersion


class Body(BaseModel):
    """Base class of the bodies."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class DiffusionUsage(Body):
    """Cost of denoising."""

    num_forwards: int
    num_blocks: int
    tokens_per_forward: float


class Usage(Body):
    """Token counts, and the cost of denoising."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    diffusion: DiffusionUsage


class StepMap(Body):
    """Denoise step that committed each token of the text, and the policy's confidence."""

    step_map: list[int]
    token_ids: list[int]
    confidence: list[float]
    tokens: list[str]


class TextLogprobs(Body):
    """Text, offset and log-probability of each token of a completion, at the step that committed it."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None
    text_offset: list[int]


class TokenLogprob(Body):
    """Token of a reply, and its log-probability at the step that committed it."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[None]


class ChatLogprobs(Body):
    """Log-probabilities of the tokens of a reply."""

    content: list[TokenLogprob]
    refusal: None


class _Choice(Body):
    index: int
    finish_reason: Literal["stop", "length"]
    diffusion: StepMap | None = None
    """Set with `diffusion.return_step_map`."""


class TextChoice(_Choice):
    """A completion."""

    text: str
    logprobs: TextLogprobs | None


class Reply(Body):
    """Message of the policy."""

    role: Literal["assistant"]
    content: str


class ChatChoice(_Choice):
    """A reply."""

    message: Reply
    logprobs: ChatLogprobs | None


class _Head(Body):
    id: str
    created: int
    model: str
    system_fingerprint: str
    policy_version: int
    """Policy version that generated the whole answer."""


class _Answer(_Head):
    usage: Usage


class TextAnswer(_Answer):
    """Answer of `POST /v1/completions`."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ChatAnswer(_Answer):
    """Answer of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Slot(Body):
    """Slot of a canvas."""

    text: str
    masked: bool
    step: int
    """Denoise step since which it has held its token; -1 if it is masked, or the token was given. A renoising policy
    can mask the slot again."""
    confidence: float | None


class CanvasReply(Body):
    """Whole canvas after a denoise step; the last one of a stream can include the step map."""

    step: int
    num_steps: int | None
    """None if it is not known in advance."""
    slots: list[Slot]
    step_map: list[int] | None = None
    token_ids: list[int] | None = None
    confidence: list[float] | None = None
    tokens: list[str] | None = None


class _Part(Body):
    index: int
    finish_reason: Literal["stop", "length"] | None
    diffusion: StepMap | CanvasReply | None = None


class TextPart(_Part):
    """Next part of a completion, or all of it with a canvas."""

    text: str
    logprobs: TextLogprobs | None
    """In the last part of a choice: those of all its tokens."""


class Delta(Body):
    """Next text of a reply."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatPart(_Part):
    """Next part of a reply, or all of it with a canvas."""

    delta: Delta
    logprobs: ChatLogprobs | None
    """In the last part of a choice: those of all its tokens."""


class _Chunk(_Head):
    usage: Usage | None = None
    """Present with `stream_options.include_usage`: null, except in the last chunk."""


class TextChunk(_Chunk):
    """Event of a stream of `POST /v1/completions`."""

    object: Literal["text_completion"]
    choices: list[TextPart]


class ChatChunk(_Chunk):
    """Event of a stream of `POST /v1/chat/completions`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatPart]


class PolicyEvent(BaseModel):
    """Event of a policy version, or of all of them; its kind is the event's name."""

    version: int | None
    """The policy version; null if the event concerns all versions."""
    round: int | None
    """The round that published it."""
    why: str | None
    """The reason, as a sentence."""
    time_s: float
    """Time of the event (unix time)."""


class Model(Body):
    """Name of a policy version."""

    id: str
    object: Literal["model"]
    created: int
    """Start time of this service (unix time)."""
    owned_by: str
    policy_version: int | None
    max_model_len: int
    """Maximum tokens of prompt and canvas together."""


class Models(Body):
    """List of the models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Body):
    """Token ids of a text."""

    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(Body):
    """The text of token ids."""

    prompt: str


class ScoreReply(Body):
    """Held-out accuracy at temperature 0."""

    policy_version: int
    num_correct: int
    num_problems: int
    accuracy: float
    interval_95: list[float] = Field(min_length=2, max_length=2)


class Lag(Body):
    """Lag of the service behind the newest announced version."""

    published: int
    behind: int


class _Version(Body):
    policy_version: int
    round: int
    phase: str
    checksum: str | None
    score: ScoreReply | None


class Policy(_Version):
    """The serving version."""

    run: str
    lag: Lag
    aliases: dict[str, int]
    pinned: int | None
    paused: bool
    live: list[int]
    num_swaps: int
    refused: list[RefusedVersion]
    last_error: str | None


class PolicyOfVersion(_Version):
    """Version that an engine, the registry or the run directory knows."""

    is_live: bool
    is_serving: bool


class PolicyExamples(Body):
    """Single-turn example prompts: held-out problems of the run's task, or a checkpoint's model card examples."""

    task: str | None
    prompts: list[str]


class Health(Body):
    """That the service is alive."""

    status: Literal["ok", "degraded"]
    policy_version: int
    registry_reachable: bool
    follower_errors: int


class Ready(Body):
    """That it answers."""

    status: Literal["ready"]
    policy_version: int
    num_engines: int


class D1Version(Body):
    """Of d1 itself."""

    version: str
