"""Body of `POST /v1/responses`: OpenAI's newer format, with the conversation in `input`."""

from __future__ import annotations

from functools import cached_property
from itertools import filterfalse
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from deploy.requests.base import MAX_INT32, valid_text
from deploy.requests.body import CompletionBody
from deploy.requests.errors import RequestError
from deploy.requests.ignored_fields import OF_ITEMS, OF_RESPONSES
from deploy.requests.structured.fields import TextOptions
from deploy.requests.structured.structure import Structure
from deploy.requests.turns import (
    MAX_CHARACTERS,
    MAX_MESSAGES,
    MAX_PARTS,
    TemplateOptions,
    TextContentPart,
    Turn,
    check_texts,
)


class InputPart(TextContentPart):
    """Content part of an item; only text is supported."""

    field_prefix = "input.content."


_Parts = Annotated[list[InputPart], Field(max_length=MAX_PARTS)]


class InputItem(Turn):
    """A turn of a conversation."""

    ignored_values = OF_ITEMS
    field_prefix = "input."

    type: Literal["message"] = "message"
    content: _Parts  # type: ignore[assignment]  # the same parts, which refuse by the names of this format

    @field_validator("type", mode="before")
    @classmethod
    def _type(cls, kind: Any) -> Any:
        if isinstance(kind, str) and kind != "message":
            message = "`input` has an item that is no message; this service has no tools, and reads text only"
            raise RequestError(message, "unsupported_parameter", param="input")
        return kind


_LOGPROBS = "message.output_text.logprobs"
_Text = Annotated[str, Field(max_length=MAX_CHARACTERS), AfterValidator(valid_text)]
_Turn = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
_Items = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]


class ResponsesRequest(CompletionBody, TemplateOptions):
    """`POST /v1/responses`. Stateless: each request contains its whole conversation."""

    ignored_values = OF_RESPONSES
    prompt_field = "input"

    input: _Items
    """A user's turn, or a conversation."""
    n: Literal[1] | None = None
    """A response has exactly one text."""
    instructions: _Text | None = None
    """System message, placed before the conversation."""
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """Maximum tokens of the text."""
    text: TextOptions | None = None
    """Structured output, like `response_format` of the other endpoints."""
    include: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=16)] = Field(default=[])
    """Extra output of tools and hidden reasoning. Ignored: this service has neither."""
    metadata: Annotated[dict[str, str], Field(max_length=64)] = Field(default={})
    """Returned with the answer."""

    @field_validator("input", mode="before", json_schema_input_type=_Turn | _Items)
    @classmethod
    def _input(cls, given: Any) -> Any:
        if not isinstance(given, str | list) or not given:
            raise ValueError("must be a string or a list of messages, and not empty")
        # Earlier reasoning is dropped, as most chat templates do.
        return [{"role": "user", "content": given}] if isinstance(given, str) else [*filterfalse(_is_reasoning, given)]

    @field_validator("include", mode="after")
    @classmethod
    def _include(cls, include: list[str]) -> list[str]:
        if _LOGPROBS in include:
            message = f"`include` has `{_LOGPROBS}`, which this service has for chats and completions only"
            raise RequestError(message, "unsupported_parameter", param="include")
        return include

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        if self.shows_canvas:
            message = "`diffusion.stream` of canvases is for chats and completions; leave it out"
            raise RequestError(message, param="diffusion.stream")
        check_texts([turn["content"] for turn in self.turns])
        return self

    @cached_property
    def _structures(self) -> list[Structure]:
        own = None if self.text is None else self.text.structure
        return [*super()._structures, *([own] if own else [])]

    @property
    def turns(self) -> list[dict[str, str]]:
        """Conversation in the format of a chat template."""
        said = [{"role": "system", "content": self.instructions}] if self.instructions is not None else []
        return [*said, *(item.turn for item in self.input)]

    @property
    def most_tokens(self) -> int | None:
        """See `CompletionBody`."""
        return self.max_output_tokens or self.max_tokens


def _is_reasoning(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "reasoning"
