"""Base class of request bodies: null means absent, 1.0 means 1. Unsupported fields are rejected by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from deploy.requests.errors import RequestError
from deploy.requests.ignored_fields import IgnoredValues

MAX_INT32 = 2**31 - 1
MAX_FIELDS = 256
"""Maximum fields of one object, known or unknown."""
MAX_CHARACTERS = 2**18
"""Maximum characters of all prompts or messages of a request. Tokenizing them takes half a second of a core. A body has
room for four times as many."""
_EXACT = 2**53
"""Integers below it are exact in float64."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_WHY = {
    "top_logprobs": "only the log-probability of each committed token is recorded",
    "echo": "it serves to ask for log-probabilities of the prompt, which a diffusion policy does not have",
}


class RequestBody(BaseModel):
    """Base class of JSON objects in requests."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, protected_namespaces=())
    ignored_values: ClassVar[IgnoredValues] = {}
    """Unsupported fields, with the values that change nothing and are accepted. Others are rejected by name."""
    field_prefix: ClassVar[str] = ""
    """Prefix of field names in error messages."""

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, values: Any) -> Any:
        """Drop null fields, which clients send for unset ones, and reject unsupported fields."""
        if not isinstance(values, Mapping):
            return values
        if len(values) > MAX_FIELDS:
            # Checked first: pydantic would report a separate error for every unknown field.
            where = cls.field_prefix.removesuffix(".") or "the body"
            raise RequestError(f"{where} has {len(values)} fields; an object of a request has at most {MAX_FIELDS}")
        given = {name: _number(value) for name, value in values.items() if value is not None}
        for name, neutral in cls.ignored_values.items():
            if name in given and not _is_neutral(given.pop(name), neutral):
                field, why = cls.field_prefix + name, _WHY.get(name, "this service does not do that")
                raise RequestError(f"`{field}` is not supported: {why}", "unsupported_parameter", param=field)
        return given


def valid_text(text: str) -> str:
    """Return the text. Raises ValueError if it contains a lone surrogate."""
    if not is_valid_text(text):
        raise ValueError("has half of a surrogate pair, which is not valid text")
    return text


def is_valid_text(text: str) -> bool:
    """Return whether the text contains no lone surrogate."""
    return _LONE_SURROGATE.search(text) is None


def check_texts(texts: list[str]) -> None:
    """Raise ValueError if the texts are too long in total, or one contains a lone surrogate."""
    if sum(map(len, texts)) > MAX_CHARACTERS:
        raise ValueError(f"must have at most {MAX_CHARACTERS} characters in all")
    for text in texts:
        valid_text(text)


def is_id(value: Any) -> bool:
    """Return whether the value is an int and not a bool, as token ids are."""
    return type(value) is int


def _number(value: Any) -> Any:
    # JSON has a single number type: 16.0 is the integer 16.
    return int(value) if type(value) is float and value.is_integer() and abs(value) < _EXACT else value


def _is_neutral(value: Any, neutral: tuple[Any, ...] | None) -> bool:
    """Return whether a non-null value is neutral, so that its field can be ignored."""
    # In Python False == 0, but `logprobs: 0` requests log-probabilities.
    return neutral is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
