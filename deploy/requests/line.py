"""JSONL lines of `d1 sample --requests`: an HTTP body, or the same in the sampler's own keys."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError, field_validator
from pydantic_core import PydanticCustomError

from deploy.requests.body import FIELD_PATHS, ChatRequest, CompletionBody, CompletionRequest, is_prompt
from deploy.requests.errors import RequestError, request_error_of
from deploy.requests.ignored_fields import OF_REQUESTS
from deploy.requests.parameters import SAMPLING_FIELDS, SamplerKeys, Values
from deploy.requests.turns import ChatMessage

_PROMPTS = ("prompt", "messages", "prompt_ids")
# Recipe keys that users write by mistake.
_OTHER_NAMES = {"num_denoise_steps": "steps", "num_steps": "steps"}


class RequestLine(SamplerKeys, CompletionBody):
    """Common fields of prompt lines and chat lines."""

    @property
    def sampler_values(self) -> dict[str, Any]:
        """Denoising parameters given by the sampler's own keys."""
        return {key: value for key in SAMPLING_FIELDS if (value := getattr(self, key)) is not None}

    @property
    def parameter_layers(self) -> list[Values]:
        """See `CompletionBody`. The sampler's own keys override the body's."""
        return [*super().parameter_layers, self.sampler_values]

    @property
    def fixed(self) -> dict[str, int]:
        """See `CompletionBody`."""
        return super().fixed | (self.fixed_tokens or {})

    @property
    def names(self) -> dict[str, str]:
        """See `CompletionBody`. Each given field has the name under which it was given."""
        body = {key: FIELD_PATHS.get(key, key) for key in super().parameter_layers[0]}
        own = {key: key for key in SamplerKeys.model_fields if getattr(self, key) is not None}
        if super().fixed:
            body["fixed_tokens"] = FIELD_PATHS["fixed_tokens"]
        return {"prompt_ids": self.prompt_field} | body | own | self.grammar_name

    def seeds(self, key: int) -> list[int]:
        """Return the seeds, see `CompletionBody`. A single completion uses the seed itself."""
        return [key] if self.num_prompts * self.num_choices == 1 else super().seeds(key)


class CompletionLine(RequestLine, CompletionRequest):
    """A line with a prompt."""

    prompt: Any = None
    """See `CompletionRequest`, without the length limit."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt(cls, prompt: Any) -> Any:
        if not is_prompt(prompt):
            raise PydanticCustomError("prompt_type", "Input should be text, token ids or a list of either")
        return prompt

    @property
    def prompts(self) -> list[str | list[int]]:
        """See `CompletionRequest`."""
        return super().prompts if self.prompt_ids is None else [self.prompt_ids]


class LineMessage(ChatMessage):
    """Conversation turn with any role that the chat template supports."""

    role: str  # type: ignore[assignment]  # wider than a body's

    @property
    def turn(self) -> dict[str, str]:
        """See `ChatMessage`. The role is passed on unchanged."""
        return super().turn | {"role": self.role}


class ChatLine(RequestLine, ChatRequest):
    """A line with a conversation."""

    messages: list[LineMessage]  # type: ignore[assignment]  # wider than a body's
    """See `ChatRequest`, without the length limits."""


_FIELDS = SamplerKeys.model_fields | CompletionLine.model_fields | ChatLine.model_fields
_KEYS = dict.fromkeys(("id", *_PROMPTS, *(field.alias or name for name, field in _FIELDS.items())))


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse the JSON object of a line. Raises RequestError if it is invalid."""
    try:
        found = json.loads(
            data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant, parse_float=_float
        )
    except UnicodeDecodeError as error:
        raise RequestError(f"it is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from error
    except json.JSONDecodeError as error:
        raise RequestError(f"it is not JSON: {error.msg} at character {error.colno}") from error
    except RecursionError as error:
        raise RequestError("it is not JSON that a request needs: it is nested too deeply") from error
    except ValueError as error:
        # Python refuses to parse integers of thousands of digits.
        raise RequestError("it is not JSON that a request needs: a number has too many digits") from error
    if not isinstance(found, dict):
        raise RequestError("it is not a JSON object; a request is {...} with a prompt and its settings")
    return found


def read_line(data: Mapping[str, Any], names: Mapping[str, str] | None = None) -> CompletionLine | ChatLine:
    """Validate the keys and values of a line. Raises RequestError, with field names from `names`."""
    for key in data:
        if key not in _KEYS and key not in OF_REQUESTS:
            raise RequestError(_unknown_key(key))
    given = [key for key in _PROMPTS if data.get(key) is not None]
    if not given:
        raise RequestError("there is no prompt; give prompt, messages or prompt_ids")
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} are given; one of them is the prompt, leave the other out")
    kind = ChatLine if given == ["messages"] else CompletionLine
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise request_error_of(error, kind, names) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RequestError(f"{key} is given twice; leave one out")
        found[key] = value
    return found


def _constant(name: str) -> float:
    raise RequestError(f"it is not JSON: {name} is not a number in JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RequestError(f"the number {text[:20]} is too large")
    return value


def _unknown_key(key: str) -> str:
    if guess := _OTHER_NAMES.get(key) or next(iter(get_close_matches(key, _KEYS, n=1)), None):
        return f"{key} is not a key of a request; did you mean {guess}?"
    return f"{key} is not a key of a request, which has {', '.join(_KEYS)}"
