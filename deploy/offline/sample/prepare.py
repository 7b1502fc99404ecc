"""Request preparation of `d1 sample`: parses lines and options, and plans or rejects each request."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deploy.errors import UserError, reason
from deploy.offline.policy import ReadyPolicy
from deploy.offline.sample.codec import PromptCodec
from deploy.requests.errors import RequestError, request_error_of
from deploy.requests.line import parse_object, read_line
from deploy.requests.parameters import SAMPLING_KEYS, sampler_names, to_params
from deploy.requests.planner import Planner, RequestPlan
from rewards.data.encoding import decode_text
from rollout.field_error import FieldError
from rollout.request import Request, SamplingParams

OPTION_KEYS = tuple(key for key in SAMPLING_KEYS if key not in ("forbidden_ids", "stop_ids"))
"""Denoising keys that are also command line options."""

_OPTIONS = {key: f"--{key.replace('_', '-')}" for key in ("seed", *OPTION_KEYS)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Command line options that apply to every request."""

    values: Mapping[str, Any]
    """The given seed and denoising parameters, by the sampler's keys."""
    keep_after_eos: bool
    """Whether every request fills its canvas, ignoring stop ids."""

    @property
    def names(self) -> dict[str, str]:
        """Option names of the given values."""
        return {key: _OPTIONS[key] for key in self.values}

    def planner(self, policy: ReadyPolicy) -> Planner:
        """Create a planner that applies these options."""
        given = {key: value for key, value in self.values.items() if key != "seed"}
        return Planner(PromptCodec(policy=policy), policy.defaults, given, self.values.get("seed", 0))

    def over(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request's keys and values, overridden by the options."""
        return {**data, "stop_ids": []} if self.keep_after_eos else dict(data)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCompletion:
    """One requested completion, or a rejected request."""

    index: int
    """Index of its request, from 0."""
    line_number: int
    """Line number in the file, from 1, counting empty lines."""
    id: Any
    """Id of the request as given; None without one."""
    plan: RequestPlan | None = None
    """Plan of its request; None if rejected."""
    choice: int = 0
    """Index among the completions of its request, from 0."""
    error: str = ""
    """Reason for the rejection; empty if planned."""

    @property
    def request(self) -> Request | None:
        """Request to the sampler; None if rejected."""
        return None if self.plan is None else self.plan.masked_requests[self.choice]

    @property
    def is_one_of_several(self) -> bool:
        """Whether its request has several completions."""
        return self.plan is not None and len(self.plan.requests) > 1

    @property
    def place(self) -> str:
        """Name in messages."""
        choice = f", choice {self.choice}" if self.is_one_of_several else ""
        return f"request {self.index} (line {self.line_number}){choice}"


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


def prepare_file(lines: list[tuple[int, bytes]], policy: ReadyPolicy, options: Options) -> Iterator[PlannedCompletion]:
    """Yield the completions of each line, or its error."""
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
            yield PlannedCompletion(index=index, line_number=number, id=data.get("id"), error=str(error))
        else:
            for choice in range(len(plan.requests)):
                yield PlannedCompletion(index=index, line_number=number, id=line.id, plan=plan, choice=choice)


def prepare_prompt(request: Mapping[str, Any], policy: ReadyPolicy, options: Options) -> PlannedCompletion:
    """Plan the prompt of the command line. Raises UserError, with option names, if it is invalid."""
    if policy.tokenizer is None:
        raise UserError(f"{policy.name} has no tokenizer; give token ids: --requests FILE with prompt_ids")
    try:
        line = read_line(options.over(request))
        plan = options.planner(policy).plan(line, _OPTIONS | {"prompt_ids": "the prompt"})
    except RequestError as error:
        raise UserError(str(error)) from error
    return PlannedCompletion(index=0, line_number=1, id=None, plan=plan)


def check_options(options: Options) -> None:
    """Raise UserError for an option whose value is invalid with any request."""
    names = sampler_names(_OPTIONS)
    try:
        line = read_line({"prompt_ids": [0], **options.values}, names)
        if (seed := options.values.get("seed", 0)) < 0:
            raise RequestError(f"--seed {seed} is not between 0 and 2**63 - 1")
        to_params(line.sampler_values)
    except RequestError as error:
        raise UserError(str(error)) from error
    except ValidationError as error:
        # Options that conflict with each other here may be consistent with a request.
        if not isinstance(error.errors()[0].get("ctx", {}).get("error"), FieldError):
            raise UserError(str(request_error_of(error, SamplingParams, names))) from error
