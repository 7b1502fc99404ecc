"""Conversation turns and chat template variables of chats and `/tokenize`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from deploy.requests.base import MAX_INT32, RequestBody, check_texts, is_valid_text
from deploy.requests.errors import RequestError
from deploy.requests.ignored_fields import OF_PARTS, OF_TURNS

MAX_MESSAGES = 256
MAX_PARTS = 256
"""Maximum parts of one message."""
MAX_VARIABLES = 16
"""Maximum variables for a chat template."""
MAX_VARIABLE_LENGTH = 256

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_UNSUPPORTED_PARTS = ("file", "image_url", "input_audio", "refusal")


class TextContentPart(RequestBody):
    """Content part of a message; only text is supported."""

    ignored_values = OF_PARTS
    field_prefix = "messages.content."

    type: Literal["text", "input_text", "output_text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _type(cls, kind: Any) -> Any:
        if kind in _UNSUPPORTED_PARTS:
            field = cls.field_prefix.removesuffix(".")
            message = f"`{field}` has a part of the type `{kind}`; this service reads text only"
            raise RequestError(message, "unsupported_parameter", param=field)
        return kind


_Parts = Annotated[list[TextContentPart], Field(max_length=MAX_PARTS)]


class ChatMessage(RequestBody):
    """Chat turn: a role, and text in parts. The content may be null for an assistant turn without text."""

    ignored_values = OF_TURNS
    field_prefix = "messages."

    role: Literal["system", "developer", "user", "assistant"]
    content: _Parts
    name: str | None = None
    """Passed to the chat template, like `reasoning`."""
    reasoning: str | None = None
    """Earlier reasoning of the assistant."""
    reasoning_content: str | None = None
    """Older name of `reasoning`."""

    @model_validator(mode="before")
    @classmethod
    def _said_nothing(cls, turn: Any) -> Any:
        if type(turn) is dict and turn.get("role") == "assistant" and turn.get("content") is None:
            return turn | {"content": ""}
        return turn

    @field_validator("content", mode="before", json_schema_input_type=str | _Parts)
    @classmethod
    def _content(cls, content: Any) -> Any:
        if not isinstance(content, str | list):
            raise ValueError("must be a string or a list of parts")
        parts = [content] if isinstance(content, str) else content
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]

    @property
    def turn(self) -> dict[str, str]:
        """Turn in the format of a chat template. Parts are joined by newlines, as vLLM does for text templates."""
        # OpenAI's `developer` role is the new name of `system`.
        role = "system" if self.role == "developer" else self.role
        turn = {"role": role, "content": "\n".join(part.text for part in self.content)}
        thought = self.reasoning or self.reasoning_content
        # vLLM passes both names to a template.
        more = {"name": self.name, "reasoning": thought, "reasoning_content": thought}
        return turn | {key: value for key, value in more.items() if value is not None}


def _conversation(messages: list[ChatMessage]) -> list[ChatMessage]:
    check_texts([text for message in messages for text in message.turn.values()])
    return messages


Conversation = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), AfterValidator(_conversation)]


class Reasoning(RequestBody):
    """Reasoning effort, passed to the chat template."""

    ignored_values: ClassVar = dict.fromkeys(("exclude", "generate_summary", "summary"))
    field_prefix = "reasoning."

    effort: Effort | None = None


class TemplateOptions(RequestBody):
    """Base class of bodies with variables for the chat template."""

    chat_template_kwargs: Annotated[dict[str, bool | int | float | str], Field(max_length=MAX_VARIABLES)] = Field(
        default={}
    )
    """Variables for the chat template, such as `{"enable_thinking": false}`."""
    reasoning_effort: Effort | None = None
    """As in vLLM: sets the template variables `reasoning_effort` and `enable_thinking` (false for `none`)."""
    reasoning: Reasoning | None = None
    """OpenAI's alternative form, used if `reasoning_effort` is absent."""

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _variables(cls, given: Any) -> Any:
        given = {name: value for name, value in given.items() if value is not None} if type(given) is dict else given
        if not isinstance(given, dict) or len(given) > MAX_VARIABLES or not all(map(_is_variable, given.items())):
            raise ValueError(
                f"must be at most {MAX_VARIABLES} names with true, false, a number or at most {MAX_VARIABLE_LENGTH} "
                "characters each"
            )
        return given

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template."""
        effort = self.reasoning_effort or (self.reasoning and self.reasoning.effort)
        asked = {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort else {}
        return asked | self.chat_template_kwargs


def _is_variable(item: tuple[str, Any]) -> bool:
    name, value = item
    if not name.isidentifier() or len(name) > MAX_VARIABLE_LENGTH:
        return False
    if isinstance(value, str):
        return len(value) <= MAX_VARIABLE_LENGTH and is_valid_text(value)
    return isinstance(value, bool) or (isinstance(value, int | float) and abs(value) <= MAX_INT32)
