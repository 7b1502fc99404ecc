"""What all bodies of requests share: null is as left out, 1.0 is 1, and what cannot be served is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from deploy.requests.neutral import Neutral, asks_nothing
from deploy.requests.refusals import RequestError

LARGEST = 2**31 - 1
MAX_FIELDS = 256
"""Fields of one object, known or not."""
_EXACT = 2**53
"""Below it every whole number is a float64 too."""
_HALF = re.compile("[\ud800-\udfff]")
_WHY = {
    "top_logprobs": "only the log-probability of each committed token is recorded",
    "echo": "it serves to ask for log-probabilities of the prompt, which a diffusion policy does not have",
}


class Body(BaseModel):
    """An object of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, protected_namespaces=())
    neutral: ClassVar[Neutral] = {}
    """Fields that it does not have, with the values that change nothing. Others are refused by name."""
    place: ClassVar[str] = ""
    """What stands before the name."""

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: Any) -> Any:
        """What is null is left out: clients send null for what they do not ask for."""
        if not isinstance(values, Mapping):
            return values
        if len(values) > MAX_FIELDS:
            # Before they are looked at: each that is not known would be a mistake of its own.
            where = cls.place.removesuffix(".") or "the body"
            raise RequestError(f"{where} has {len(values)} fields; an object of a request has at most {MAX_FIELDS}")
        given = {name: _number(value) for name, value in values.items() if value is not None}
        for name, neutral in cls.neutral.items():
            if name in given and not asks_nothing(given.pop(name), neutral):
                field, why = cls.place + name, _WHY.get(name, "this service does not do that")
                raise RequestError(f"`{field}` is not supported: {why}", "unsupported_parameter", param=field)
        return given


def whole(text: str) -> str:
    """The text. Raises ValueError where it has half of a surrogate pair."""
    if not is_whole(text):
        raise ValueError("has half of a surrogate pair, which is no text")
    return text


def is_whole(text: str) -> bool:
    """Whether it has no half of a surrogate pair."""
    return _HALF.search(text) is None


def is_id(value: Any) -> bool:
    """Whether it is a whole number, as token ids are."""
    return type(value) is int


def _number(value: Any) -> Any:
    # JSON has one kind of numbers: 16.0 is a whole one.
    return int(value) if type(value) is float and value.is_integer() and abs(value) < _EXACT else value
