"""`d1 sample` for policies without a mask token (DiffusionGemma): a prompt or a file of requests."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from deploy.errors import UserError
from deploy.offline.policy import Device, as_user_errors, read_tokenizer
from deploy.offline.sample.answers import shortest_floats, work_summary
from deploy.printing import printable
from deploy.requests.base import is_valid_text
from deploy.requests.errors import TEMPLATE_ERRORS, RequestError, request_error_of, template_error_text
from deploy.requests.line import LineMessage, parse_object
from deploy.requests.parameters import sampler_names, to_renoising_params
from deploy.requests.renoising import RenoisingDefaults, check_keys
from learner.hardware import indexed_device
from learner.model.renoising.policy import load_renoising_policy
from learner.model.tokenizer import ChatTokenizer
from rollout.field_error import FieldError
from rollout.renoising.request import RenoisedCompletion, RenoisingParams, RenoisingRequest, check_renoising_request
from rollout.renoising.sampler import RenoisingSampler

_OPTIONS = ("seed", "gen_length", "steps", "entropy_bound")
_PROMPTS = ("prompt", "messages", "prompt_ids")


class RenoisingLine(BaseModel):
    """One line of a file of requests, by the keys of this family."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: Any = None
    prompt: str | None = None
    messages: list[LineMessage] | None = None
    prompt_ids: list[int] | None = None
    seed: int = 0
    gen_length: int | None = None
    steps: int | None = None
    entropy_bound: float | None = None
    t_min: float | None = None
    t_max: float | None = None
    stability_threshold: int | None = None
    confidence_threshold: float | None = None
    stop_ids: list[int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyRenoising:
    """Loaded checkpoint of this family, ready to sample."""

    name: str
    sampler: RenoisingSampler
    tokenizer: ChatTokenizer | None

    def request(self, line: RenoisingLine, *, keep_after_eos: bool) -> RenoisingRequest:
        """Convert a line to a sampler request. Raises ValueError, naming the key, if it is invalid."""
        if [line.prompt, line.messages, line.prompt_ids].count(None) != 2:
            raise ValueError("give prompt, messages or prompt_ids, one of them")
        given = line.model_dump(exclude_none=True, exclude={*_PROMPTS, "id", "seed", "stop_ids"})
        ids = self._ids(line)
        config = self.sampler.policy.config
        params = to_renoising_params(RenoisingDefaults(config=config).complete([given], len(ids)))
        stop_ids = None if line.stop_ids is None else tuple(line.stop_ids)
        request = RenoisingRequest(
            prompt_ids=tuple(ids), params=params, seed=line.seed, stop_ids=() if keep_after_eos else stop_ids
        )
        check_renoising_request(request, config)
        return request

    def _ids(self, line: RenoisingLine) -> list[int]:
        if line.prompt_ids is not None:
            return line.prompt_ids
        if self.tokenizer is None:
            raise ValueError(f"the prompt is text, and {self.name} has no tokenizer; give prompt_ids")
        turns = [message.turn for message in line.messages or ()]
        texts = [text for turn in turns for text in turn.values()] if line.prompt is None else [line.prompt]
        if not all(map(is_valid_text, texts)):
            name = "messages" if line.prompt is None else "prompt"
            raise ValueError(f"{name} has half of a surrogate pair or bytes that are not UTF-8, which is no text")
        if line.prompt is not None:
            return self.tokenizer.encode_text(line.prompt, add_special_tokens=True)
        try:
            return self.tokenizer.encode_chat(turns)
        except TEMPLATE_ERRORS as error:
            raise ValueError(f"the prompt does not fit the chat template: {template_error_text(error)}") from error

    def text(self, ids: Sequence[int]) -> str:
        """Decode ids to text; without a tokenizer, list the ids."""
        return " ".join(map(str, ids)) if self.tokenizer is None else self.tokenizer.decode(ids)


def open_renoising(directory: Path, reference: str, device: Device, dtype: torch.dtype) -> ReadyRenoising:
    """Load a checkpoint of this family. Raises UserError if it cannot be read."""
    with as_user_errors(reference):
        policy = load_renoising_policy(directory, dtype).to(indexed_device(device))
    sampler = RenoisingSampler(policy, policy_version=0)
    return ReadyRenoising(name=reference, sampler=sampler, tokenizer=read_tokenizer(directory))


def check_renoising_options(values: Mapping[str, Any]) -> None:
    """Raise UserError for an option that this family does not support."""
    try:
        check_keys(values, _OPTIONS)
    except FieldError as error:
        raise UserError(error.named({key: f"--{key.replace('_', '-')}" for key in (*values, *_OPTIONS)})) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedRequest:
    """Request of a file, or the reason why it was rejected."""

    index: int
    place: str
    id: Any
    request: RenoisingRequest | None
    error: str = ""


def parse_requests(
    ready: ReadyRenoising,
    lines: Sequence[tuple[int, bytes]],
    values: Mapping[str, Any],
    *,
    keep_after_eos: bool,
) -> Iterator[ParsedRequest]:
    """Yield the requests of a file; `values` are option values, overridden by each line."""
    for index, (number, text) in enumerate(lines):
        place, data = f"request {index} (line {number})", dict[str, Any]()
        try:
            data = parse_object(text)
            line = RenoisingLine.model_validate({**values, **data})
            request = ready.request(line, keep_after_eos=keep_after_eos)
        except ValidationError as error:
            kind = RenoisingLine if error.title == RenoisingLine.__name__ else RenoisingParams
            said = str(request_error_of(error, kind, sampler_names({})))
            yield ParsedRequest(index=index, place=place, id=data.get("id"), request=None, error=said)
        except (RequestError, ValueError) as error:
            yield ParsedRequest(index=index, place=place, id=data.get("id"), request=None, error=str(error))
        else:
            yield ParsedRequest(index=index, place=place, id=line.id, request=request)


def answer_all(ready: ReadyRenoising, items: Sequence[ParsedRequest], *, as_json: bool) -> int:
    """Sample and print all valid requests, and report the rejected ones. Returns how many were rejected."""
    refused = [item for item in items if item.request is None]
    for item in refused:
        sys.stderr.write(f"d1: {printable(f'{item.place}: {item.error}')}\n")
    for item in items:
        head = {"index": item.index} | ({} if item.id is None else {"id": item.id})
        if item.request is None:
            if as_json:
                _print(json.dumps(head | {"error": item.error}))
            continue
        completion = ready.sampler.complete(item.request, on_step=_progress if sys.stderr.isatty() else None)
        ids = completion.token_ids[: completion.num_tokens].tolist()
        if as_json:
            _print(json.dumps(head | _answer(ready, completion, ids)))
            continue
        if len(items) > 1:
            _print(f"--- {item.place}: {work_summary(len(ids), completion.num_forwards)}, {completion.finish_reason}")
        _print(printable(ready.text(ids)))
        if len(items) == 1:
            sys.stderr.write(f"{work_summary(len(ids), completion.num_forwards)}, {completion.finish_reason}\n")
    return len(refused)


def _answer(ready: ReadyRenoising, completion: RenoisedCompletion, ids: list[int]) -> dict[str, Any]:
    """Return the completion as JSON, with the record of each canvas from which its likelihood is computed."""
    return {
        "token_ids": ids,
        "text": None if ready.tokenizer is None else ready.text(ids),
        "num_tokens": len(ids),
        "canvases": [
            {
                "seen": canvas.seen.tolist(),
                "drawn": canvas.drawn.tolist(),
                "drawn_logp": [shortest_floats(step) for step in canvas.drawn_logp],
                "accepted": canvas.accepted.tolist(),
                "argmax": canvas.argmax.tolist(),
                "mean_entropy": shortest_floats(canvas.mean_entropy),
            }
            for canvas in completion.canvases
        ],
        "num_forwards": completion.num_forwards,
        "finish_reason": str(completion.finish_reason),
        "policy_version": completion.policy_version,
    }


def _progress(canvas: int, step: int, _ids: Tensor, kept_C: Tensor) -> None:
    kept = f"{int(kept_C.sum())} of {len(kept_C)} slots kept"
    sys.stderr.write(f"\rcanvas {canvas + 1}, step {step + 1}: {kept} \x1b[K\r")


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
