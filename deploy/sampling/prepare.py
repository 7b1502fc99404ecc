"""From what was written to what the sampler takes, or to a sentence why not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from deploy.errors import UserError, reason
from deploy.recipe.refusals import shortened
from deploy.sampling.policy import Policy
from deploy.sampling.request_line import (
    SAMPLING_KEYS,
    RequestError,
    RequestLine,
    check_values,
    parse_fields,
    parse_line,
    renamed,
    to_params,
)
from learner.model.tokenizer import ChatTokenizer
from rollout.request import Request, check_request

OPTION_KEYS = tuple(key for key in SAMPLING_KEYS if key not in ("forbidden_ids", "stop_ids"))
"""Keys of how to denoise that are options of the command line too."""

_SLOT = re.compile("0|[1-9][0-9]{0,17}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line says of every request."""

    values: Mapping[str, Any]
    """What was given of `seed` and of how to denoise, by the keys of a line."""
    is_raw: bool
    """Whether a `prompt` is taken as it is, without the chat template."""
    keep_after_eos: bool
    """Whether every request fills its canvas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One request of a file."""

    index: int
    """Its place among the requests, from 0."""
    line_number: int
    """Its place in the file, from 1, empty lines counted."""
    id: Any
    """As it was given; None without."""
    request: Request | None
    """None where it cannot be served."""
    error: str
    """Why not; empty where it can."""

    @property
    def place(self) -> str:
        """How it is called in a message."""
        return f"request {self.index} (line {self.line_number})"


def read_lines(path: str, stdin: bytes | None = None) -> list[tuple[int, bytes]]:
    """The lines of a file of requests that are not empty, with their numbers from 1.

    Args:
        path: the file.
        stdin: what is read instead of the file.

    Raises:
        UserError: it cannot be read, or has no request.
    """
    try:
        data = Path(path).read_bytes() if stdin is None else stdin
    except OSError as error:
        raise UserError(f"cannot read the requests {path}: {reason(error)}") from error
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        where = "standard input" if stdin is not None else path
        raise UserError(f"{where} has no requests; it should have one JSON object on each line")
    return numbered


def prepare_file(lines: list[tuple[int, bytes]], policy: Policy, options: Options) -> Iterator[Item]:
    """Each line's request, or what is wrong with it."""
    for index, (number, data) in enumerate(lines):
        request_id, request, error = None, None, ""
        try:
            line = parse_line(_decoded(data))
            request_id = line.id
            request = _to_request(line, policy, options)
        except RequestError as refusal:
            request_id, error = request_id if request_id is not None else refusal.request_id, str(refusal)
        yield Item(index=index, line_number=number, id=request_id, request=request, error=error)


def prepare_prompt(prompt: str, policy: Policy, options: Options) -> Request:
    """The request of a prompt on the command line. Raises UserError, with the names of options."""
    if policy.tokenizer is None:
        raise UserError(f"{policy.name} has no tokenizer; give token ids: --requests FILE with prompt_ids")
    try:
        return _to_request(RequestLine(prompt=prompt), policy, options, names=_option_names())
    except RequestError as error:
        raise UserError(str(error)) from error


def check_options(options: Options) -> None:
    """Raise UserError for an option whose value is wrong whatever the requests are."""
    try:
        parse_fields(options.values)
        check_values({key: value for key, value in options.values.items() if key != "seed"})
        if options.values.get("seed", 0) < 0:
            raise RequestError(f"seed {options.values['seed']} is not between 0 and 2**63 - 1")
    except RequestError as error:
        raise UserError(renamed(str(error), _option_names())) from error


def _to_request(line: RequestLine, policy: Policy, options: Options, names: Mapping[str, str] | None = None) -> Request:
    """The request, if the policy can serve it. Raises RequestError, with the names that its author wrote.

    Args:
        line: what was written.
        policy: who serves it.
        options: what the line leaves out.
        names: what its author calls the fields; by default as in a line, and what comes from an option as the option.
    """
    prompt_key = line.prompt_key
    if names is None:
        from_options = {key: option for key, option in _option_names().items() if key in options.values}
        names = {key: option for key, option in from_options.items() if getattr(line, key) is None}
        names |= {"prompt_ids": prompt_key}
    tokenizer = policy.tokenizer
    if tokenizer is None and prompt_key != "prompt_ids":
        raise RequestError(f"{prompt_key} is text, and {policy.name} has no tokenizer; give prompt_ids")
    try:
        request = _assemble(line, _prompt_ids(line, tokenizer, options), policy, options)
        check_request(request, policy.config)
    except ValueError as error:
        raise RequestError(renamed(str(error), names)) from error
    return request


def _assemble(line: RequestLine, prompt_ids: tuple[int, ...], policy: Policy, options: Options) -> Request:
    given = {key: value for key, value in options.values.items() if key != "seed"}
    values = policy.defaults.complete([given, line.sampling], len(prompt_ids))
    if options.keep_after_eos:
        values["stop_ids"] = ()
    seed = line.seed if line.seed is not None else options.values.get("seed", 0)
    return Request(
        prompt_ids=prompt_ids, params=to_params(values), seed=seed, fixed_tokens=_fixed_tokens(line.fixed_tokens or {})
    )


def _prompt_ids(line: RequestLine, tokenizer: ChatTokenizer | None, options: Options) -> tuple[int, ...]:
    """The prompt's tokens. Raises RequestError."""
    if line.prompt_ids is not None:
        return tuple(line.prompt_ids)
    assert tokenizer is not None, "a prompt of text was refused without one"
    if line.prompt is not None:
        messages = [{"role": "user", "content": line.prompt}]
    else:
        messages = [message.model_dump() for message in line.messages or []]
    texts = [text for message in messages for text in message.values()]
    if not messages or line.prompt == "":
        # By the name that `renamed` knows: the command line has no key.
        raise RequestError("prompt_ids is empty; a completion needs something to complete")
    if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
        raise RequestError("prompt_ids has half of a surrogate pair or bytes that are not UTF-8, which is no text")
    if options.is_raw and line.prompt is not None:
        return tuple(tokenizer.encode_completion(line.prompt))
    try:
        return tuple(tokenizer.encode_chat(messages))
    except (TemplateError, ValueError) as error:
        # Templates refuse what they do not know; a tokenizer may have none.
        what = str(error).partition("\n")[0].partition("! ")[0]
        raise RequestError(f"prompt_ids does not fit the chat template: {what}") from error


def _fixed_tokens(given: Mapping[str, int]) -> dict[int, int]:
    fixed = {}
    for slot, token in given.items():
        if not _SLOT.fullmatch(slot):
            raise RequestError(f"fixed_tokens has slot {shortened(repr(slot))}; slots are whole numbers from 0")
        fixed[int(slot)] = token
    return fixed


def _option_names() -> dict[str, str]:
    """What the command line calls the keys of a line."""
    names = {key: f"--{key.replace('_', '-')}" for key in ("seed", *OPTION_KEYS)}
    return names | {"prompt_ids": "the prompt"}


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"it is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from error
