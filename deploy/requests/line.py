"""A request as it is written: its keys and their types. Whether the policy can serve it is looked at later."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deploy.recipe.refusals import first_refusal
from rollout.request import MAX_SEED, SamplingParams

Whole = Annotated[int, Field(le=MAX_SEED, ge=-MAX_SEED)]
"""What fits into a tensor of int64."""

_STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
_LINE_KEYS = {"num_denoise_steps": "steps"}
# Keys of a recipe and of other services that people write here.
_OTHER_NAMES = {"num_denoise_steps": "steps", "num_steps": "steps", "max_tokens": "gen_length"}


class RequestError(ValueError):
    """One sentence about a request that cannot be served, with the names that its author wrote."""

    def __init__(self, sentence: str, request_id: object = None) -> None:
        """Keep the sentence, and the request's `id` if it could be read."""
        super().__init__(sentence)
        self.request_id = request_id


class Message(BaseModel):
    """A turn of a conversation."""

    model_config = _STRICT

    role: str
    """Whose turn it is."""
    content: str
    """What was said."""


class RequestLine(BaseModel):
    """One line of a file of requests. What is None was left out."""

    model_config = _STRICT

    id: Any = None
    """Comes back with the answer."""
    prompt: str | None = None
    """The user's turn of a conversation; the chat template is applied."""
    messages: list[Message] | None = None
    """A conversation; the chat template is applied."""
    prompt_ids: list[Whole] | None = None
    """Token ids, nothing added."""
    fixed_tokens: dict[str, Whole] | None = None
    """Tokens that are given inside the completion: slot, counted from 0, to token id."""
    seed: Whole | None = None
    gen_length: Whole | None = None
    block_length: Whole | None = None
    steps: Whole | None = None
    temperature: float | None = None
    cfg_scale: float | None = None
    schedule: str | None = None
    threshold: float | None = None
    factor: float | None = None
    entropy_bound: float | None = None
    drawing: str | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    forbidden_ids: list[Whole] | None = None
    stop_ids: list[Whole] | None = None
    cache: str | None = None
    cache_refresh_steps: Whole | None = None

    @property
    def prompt_key(self) -> str:
        """Which of the three keys gives the prompt. Raises RequestError unless it is one."""
        given = [key for key in ("prompt", "messages", "prompt_ids") if getattr(self, key) is not None]
        if not given:
            raise RequestError("there is no prompt; give prompt, messages or prompt_ids")
        if len(given) > 1:
            raise RequestError(f"{' and '.join(given)} are given; one of them is the prompt, leave the other out")
        return given[0]

    @property
    def sampling(self) -> dict[str, Any]:
        """What it says of how to denoise, by the line's keys."""
        return {key: value for key in SAMPLING_KEYS if (value := getattr(self, key)) is not None}


SAMPLING_KEYS = tuple(_LINE_KEYS.get(name, name) for name in SamplingParams.model_fields)
"""Keys that become `SamplingParams`, in their order."""


def parse_line(text: str) -> RequestLine:
    """The request of a line. Raises RequestError."""
    data = _parse_json(text)
    if not isinstance(data, dict):
        raise RequestError("it is no JSON object; a request is {...} with a prompt and what is asked of it")
    try:
        return parse_fields(data)
    except RequestError as error:
        raise RequestError(str(error), data.get("id")) from error


def parse_fields(data: Mapping[str, Any]) -> RequestLine:
    """The request that the keys and values of a line, or of the command line, make. Raises RequestError."""
    for key in data:
        if key not in RequestLine.model_fields:
            raise RequestError(_unknown_key(key, "", RequestLine))
    try:
        line = RequestLine.model_validate(data)
    except ValidationError as error:
        raise RequestError(_sentence(error)) from error
    for key in ("temperature", "cfg_scale", "threshold", "factor", "entropy_bound", "top_p"):
        value = getattr(line, key)
        if value is not None and not math.isfinite(value):
            raise RequestError(f"{key} is {value}; it should be a finite number")
    return line


def to_params(values: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters by the line's keys. Raises RequestError, with the line's keys."""
    try:
        return SamplingParams.model_validate(_by_name(values))
    except ValidationError as error:
        refusal, _ = first_refusal(error, SamplingParams.model_json_schema())
        raise RequestError(renamed(refusal.sentence, _LINE_KEYS)) from error


def check_values(values: Mapping[str, Any]) -> None:
    """Raise RequestError for a value that is wrong whatever the others are."""
    try:
        SamplingParams.model_validate(_by_name(values))
    except ValidationError as error:
        if error.errors()[0]["type"] != "value_error":
            to_params(values)


def _by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    names = {key: name for name, key in _LINE_KEYS.items()}
    return {names.get(key, key): value for key, value in values.items()}


def renamed(sentence: str, names: Mapping[str, str]) -> str:
    """A sentence with other names for its fields. The values that are named like fields stay as they are."""
    if not names:
        return sentence
    longest_first = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    return re.sub(rf"(?<!schedule )(?<!')\b({longest_first})\b(?!')", lambda match: names[match[1]], sentence)


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
    except json.JSONDecodeError as error:
        raise RequestError(f"it is not JSON: {error.msg} at character {error.colno}") from error
    except RecursionError as error:
        raise RequestError("it is not JSON that a request needs: it is nested too deeply") from error
    except RequestError:
        raise
    except ValueError as error:
        # Python reads no number of thousands of digits.
        raise RequestError("it is not JSON that a request needs: a number has too many digits") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RequestError(f"{key} is given twice; leave one out")
        found[key] = value
    return found


def _constant(name: str) -> float:
    raise RequestError(f"it is not JSON: {name} is no number there")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RequestError(f"the number {text[:20]} is too large")
    return value


def _sentence(error: ValidationError) -> str:
    for detail in error.errors():
        if detail["type"] == "extra_forbidden":
            *parents, key = detail["loc"]
            place = "".join(f"[{part}]" if isinstance(part, int) else part for part in parents)
            return _unknown_key(str(key), f"{place}.", Message)
    refusal, _ = first_refusal(error, RequestLine.model_json_schema())
    return refusal.sentence.replace("a valid list", "a list").replace(
        "a valid dictionary", 'an object like {"3": 17}, slot to token id'
    )


def _unknown_key(key: str, place: str, model: type[BaseModel]) -> str:
    known, whole = model.model_fields, "message" if model is Message else "request"
    guess = _OTHER_NAMES.get(key) or next(iter(get_close_matches(key, known, n=1)), None)
    if guess in known:
        return f"{place}{key} is no key of a {whole}; did you mean {place}{guess}?"
    return f"{place}{key} is no key of a {whole}, which has {', '.join(known)}"
