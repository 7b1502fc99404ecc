"""Request preparation of `d1 sample`: parses lines and settings, and plans or rejects each request."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from deploy.errors import UserError, os_errors, user_errors
from deploy.offline.item import Item
from deploy.offline.policy import ReadyPolicy
from deploy.requests.errors import RequestError
from deploy.requests.line import parse_object, read_line
from deploy.requests.parameters import Values
from deploy.requests.planner import Planner
from rewards.data.encoding import decode_text


def make_planner(policy: ReadyPolicy, settings: Values) -> Planner:
    """Create a planner that applies the settings to requests that leave them out."""
    given = {key: value for key, value in settings.items() if key != "seed"}
    return Planner(policy.codec, policy.defaults, given, settings.get("seed", 0))


def read_lines(path: str, stdin: bytes | None = None) -> list[tuple[int, bytes]]:
    """Read the non-empty lines of a file of requests, or of `stdin` if given, with their numbers from 1.

    Raises UserError if the file cannot be read, or has no request.
    """
    with os_errors(f"cannot read the requests {path}"):
        data = Path(path).read_bytes() if stdin is None else stdin
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
    with user_errors(RequestError):
        plan = make_planner(policy, settings).plan(read_line(request), {"prompt_ids": "the prompt"})
    return Item(index=0, place="the prompt", request=plan.requests[0], plan=plan)
