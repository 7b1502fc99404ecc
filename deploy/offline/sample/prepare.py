"""Request preparation of `d1 sample`: parses lines and settings, and plans or rejects each request."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from deploy.errors import UserError, reason
from deploy.offline.item import Item
from deploy.offline.policy import ReadyPolicy
from deploy.offline.sample.codec import PromptCodec
from deploy.recipe.overrides import parse_override
from deploy.recipe.validation_errors import shortened
from deploy.requests.errors import RequestError, request_error_of
from deploy.requests.line import parse_object, read_line
from deploy.requests.parameters import SAMPLING_FIELDS, SETTINGS, Values, sampler_names, to_params, to_renoising_params
from deploy.requests.planner import Planner
from rewards.data.encoding import decode_text
from rollout.field_error import FieldError
from rollout.renoising.request import RenoisingParams
from rollout.request import SamplingParams, check_seed


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """Parse settings `KEY=VALUE`. Raises UserError for a word of another form, an unknown key or an invalid value."""
    values = {}
    for word in words:
        key, separator, _ = word.partition("=")
        if not separator:
            raise UserError(
                f"{shortened(repr(word))} should have the form KEY=VALUE, such as steps=9, after the prompt"
            )
        if key not in SETTINGS:
            guess = get_close_matches(key, SETTINGS, n=1)
            rest = f"did you mean {guess[0]}?" if guess else f"the settings are {', '.join(SETTINGS)}"
            raise UserError(f"there is no setting {shortened(key)}; {rest}")
        values[key] = parse_override(word)[1]
        if values[key] is None:
            raise UserError(f"{key} has no value; leave it out, or write one, such as {key}=9")
    _check(values)
    return values


def _check(values: Values) -> None:
    """Raise UserError for a setting whose value is invalid with any request."""
    try:
        given = read_line({"prompt_ids": [0], **values}).sampler_values
        check_seed(values.get("seed", 0))
        masked = {key: value for key, value in given.items() if SAMPLING_FIELDS[key].masked}
        others = {key: value for key, value in given.items() if key not in masked}
        _check_ranges(SamplingParams, lambda: to_params(masked))
        _check_ranges(RenoisingParams, lambda: to_renoising_params(others))
    except (RequestError, FieldError) as error:
        raise UserError(str(error)) from error


def _check_ranges(model: type[BaseModel], make: Callable[[], object]) -> None:
    try:
        make()
    except ValidationError as error:
        # Settings that conflict with each other here may be consistent with a request.
        if not isinstance(error.errors()[0].get("ctx", {}).get("error"), FieldError):
            raise request_error_of(error, model, sampler_names({})) from error


def make_planner(policy: ReadyPolicy, settings: Values) -> Planner:
    """Create a planner that applies the settings to requests that leave them out."""
    given = {key: value for key, value in settings.items() if key != "seed"}
    return Planner(PromptCodec(policy=policy), policy.defaults, given, settings.get("seed", 0))


def read_lines(path: str, stdin: bytes | None = None) -> list[tuple[int, bytes]]:
    """Read the non-empty lines of a file of requests, with their numbers from 1.

    Args:
        path: the file.
        stdin: standard input, which replaces the file if given.

    Raises:
        UserError: the file cannot be read, or has no request.
    """
    try:
        data = Path(path).read_bytes() if stdin is None else stdin
    except OSError as error:
        raise UserError(f"cannot read the requests {path}: {reason(error)}") from error
    # Undecodable bytes are rejected later, with their line.
    with suppress(ValueError):
        data = decode_text(data).encode()
    lines = data.removeprefix(BOM_UTF8).split(b"\n")
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        where = "standard input" if stdin is not None else path
        raise UserError(f"{where} has no requests; it should have one JSON object on each line")
    return numbered


def prepare_file(lines: Sequence[tuple[int, bytes]], policy: ReadyPolicy, settings: Values) -> Iterator[Item]:
    """Yield the completions of each line, or its error."""
    planner = make_planner(policy, settings)
    for index, (number, text) in enumerate(lines):
        place, data = f"request {index} (line {number})", dict[str, Any]()
        try:
            data = parse_object(text)
            line = read_line(data)
            if line.stops and policy.tokenizer is None:
                raise RequestError(f"stop is text, and {policy.name} has no tokenizer; leave it out")
            plan = planner.plan(line, line.names)
        except RequestError as error:
            yield Item(index=index, place=place, id=data.get("id"), error=str(error))
            continue
        count = len(plan.requests)
        for choice, request in enumerate(plan.requests):
            yield Item(
                index=index,
                place=f"{place}, choice {choice}" if count > 1 else place,
                id=line.id,
                sample=choice,
                num_samples=count,
                request=request,
                plan=plan,
            )


def prepare_prompt(request: Mapping[str, Any], policy: ReadyPolicy, settings: Values) -> Item:
    """Plan the prompt of the command line. Raises UserError if it is invalid."""
    if policy.tokenizer is None:
        raise UserError(f"{policy.name} has no tokenizer; give token ids: --requests FILE with prompt_ids")
    try:
        plan = make_planner(policy, settings).plan(read_line(request), {"prompt_ids": "the prompt"})
    except RequestError as error:
        raise UserError(str(error)) from error
    return Item(index=0, place="the prompt", request=plan.requests[0], plan=plan)
