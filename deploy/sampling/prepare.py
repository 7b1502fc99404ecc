"""From what was written to what the sampler takes, or to a sentence why not."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deploy.errors import UserError, reason
from deploy.requests.line import parse_object, read_line
from deploy.requests.parameters import SAMPLING_KEYS, sampler_names, to_params
from deploy.requests.planner import Planner, RequestPlan
from deploy.requests.refusals import RequestError, refusal_of
from deploy.sampling.codec import PromptCodec
from deploy.sampling.policy import ReadyPolicy
from rewards.data.encoding import decoded
from rollout.field_error import FieldError
from rollout.request import Request, SamplingParams

OPTION_KEYS = tuple(key for key in SAMPLING_KEYS if key not in ("forbidden_ids", "stop_ids"))
"""Keys of how to denoise that are options of the command line too."""

_OPTIONS = {key: f"--{key.replace('_', '-')}" for key in ("seed", *OPTION_KEYS)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line says of every request."""

    values: Mapping[str, Any]
    """What was given of `seed` and of how to denoise, by the sampler's keys."""
    keep_after_eos: bool
    """Whether every request fills its canvas."""

    @property
    def names(self) -> dict[str, str]:
        """The options that were given."""
        return {key: _OPTIONS[key] for key in self.values}

    def planner(self, policy: ReadyPolicy) -> Planner:
        """Makes the plans of requests that these options go with."""
        given = {key: value for key, value in self.values.items() if key != "seed"}
        return Planner(PromptCodec(policy=policy), policy.defaults, given, self.values.get("seed", 0))

    def over(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """A request's keys and values, with what the options put in place of its own."""
        return {**data, "stop_ids": []} if self.keep_after_eos else dict(data)


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One completion that a file asks for."""

    index: int
    """The place of its request among the requests, from 0."""
    line_number: int
    """Its place in the file, from 1, empty lines counted."""
    id: Any
    """As it was given; None without."""
    plan: RequestPlan | None = None
    """What its request asks for; None where that cannot be served."""
    choice: int = 0
    """Which of its request's completions it is, from 0."""
    error: str = ""
    """Why it cannot be served; empty where it can."""

    @property
    def request(self) -> Request | None:
        """What the sampler takes; None where it cannot be served."""
        return None if self.plan is None else self.plan.masked_requests[self.choice]

    @property
    def is_one_of_several(self) -> bool:
        """Whether its request asks for more completions."""
        return self.plan is not None and len(self.plan.requests) > 1

    @property
    def place(self) -> str:
        """How it is called in a message."""
        choice = f", choice {self.choice}" if self.is_one_of_several else ""
        return f"request {self.index} (line {self.line_number}){choice}"


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
    # Bytes that are no text are refused with the line that has them.
    with suppress(ValueError):
        data = decoded(data).encode()
    lines = data.removeprefix(BOM_UTF8).split(b"\n")
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        where = "standard input" if stdin is not None else path
        raise UserError(f"{where} has no requests; it should have one JSON object on each line")
    return numbered


def prepare_file(lines: list[tuple[int, bytes]], policy: ReadyPolicy, options: Options) -> Iterator[Item]:
    """Each line's completions, or what is wrong with it."""
    planner = options.planner(policy)
    for index, (number, text) in enumerate(lines):
        data: dict[str, Any] = {}
        try:
            data = parse_object(text)
            line = read_line(options.over(data))
            if line.stops and policy.tokenizer is None:
                raise RequestError(f"stop is text, and {policy.name} has no tokenizer; leave it out")
            plan = planner.plan(line, options.names | line.names)
        except RequestError as error:
            yield Item(index=index, line_number=number, id=data.get("id"), error=str(error))
        else:
            for choice in range(len(plan.requests)):
                yield Item(index=index, line_number=number, id=line.id, plan=plan, choice=choice)


def prepare_prompt(request: Mapping[str, Any], policy: ReadyPolicy, options: Options) -> Item:
    """The completion of what is asked on the command line. Raises UserError, with the names of options."""
    if policy.tokenizer is None:
        raise UserError(f"{policy.name} has no tokenizer; give token ids: --requests FILE with prompt_ids")
    try:
        line = read_line(options.over(request))
        plan = options.planner(policy).plan(line, _OPTIONS | {"prompt_ids": "the prompt"})
    except RequestError as error:
        raise UserError(str(error)) from error
    return Item(index=0, line_number=1, id=None, plan=plan)


def check_options(options: Options) -> None:
    """Raise UserError for an option whose value is wrong whatever the requests are."""
    names = sampler_names(_OPTIONS)
    try:
        line = read_line({"prompt_ids": [0], **options.values}, names)
        if (seed := options.values.get("seed", 0)) < 0:
            raise RequestError(f"--seed {seed} is not between 0 and 2**63 - 1")
        to_params(line.shorthand)
    except RequestError as error:
        raise UserError(str(error)) from error
    except ValidationError as error:
        # What does not go together here may do so with a request.
        if not isinstance(error.errors()[0].get("ctx", {}).get("error"), FieldError):
            raise UserError(str(refusal_of(error, SamplingParams, names))) from error
