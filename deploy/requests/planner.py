"""The planner: validates the body of a request, and makes a job for an engine of it, or a refusal."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.sampling.defaults import Defaults
from deploy.sampling.request_line import RequestError, renamed, to_params
from deploy.service.api.requests import MAX_CHOICES, ChatRequest, CompletionRequest
from deploy.service.api.text_codec import TextCodec
from deploy.service.contract import BASE, POLICY, Job
from deploy.service.errors import ServiceError
from learner.keys import fold
from rollout.request import Request, SamplingParams, check_request

_VERSION = re.compile(r"policy@v(\d{1,9})")
_SLOT = re.compile("0|[1-9][0-9]{0,8}")
# What the sampler's fields are called in a body.
_NAMES = {
    "steps": "diffusion.steps",
    "gen_length": "diffusion.gen_length",
    "block_length": "diffusion.block_length",
    "threshold": "diffusion.threshold",
    "factor": "diffusion.factor",
    "entropy_bound": "diffusion.entropy_bound",
    "schedule": "diffusion.remasking",
    "cfg_scale": "diffusion.cfg_scale",
    "forbidden_ids": "diffusion.constraints.forbidden_ids",
    "fixed_tokens": "diffusion.constraints.fixed",
    "prompt_ids": "prompt",
}
_FIELD = re.compile(r"\b(diffusion(?:\.\w+)+|prompt|temperature|top_p|top_k|seed)\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A job, and what its answer needs to know."""

    job: Job
    """What the engines do."""
    num_prompt_tokens: int
    """Of all prompts, the chat template included."""
    most_tokens: int
    """Tokens of each text, at most."""
    stops: tuple[str, ...]
    """A text ends before the first of these."""
    num_gap_slots: int | None
    """Infill: slots before the suffix; None where there is no suffix."""
    returns_step_map: bool
    """Whether each choice comes with its steps and confidences."""
    includes_usage: bool
    """Whether a stream ends with the usage."""

    @property
    def params(self) -> SamplingParams:
        """How the choices are denoised; all alike."""
        return self.job.requests[0].params


class Planner:
    """Makes the jobs of one service."""

    def __init__(self, codec: TextCodec, defaults: Defaults, name: str, timeout_s: float = 120.0) -> None:
        """Plan for a service.

        Args:
            codec: how its policy reads.
            defaults: what requests leave out.
            name: another name of `policy`.
            timeout_s: time that a job may take, in seconds.
        """
        self._codec, self._defaults, self.name, self._timeout_s = codec, defaults, name, timeout_s

    def wanted(self, model: str | None) -> str | int:
        """The alias or the version that a model's name means. Raises ServiceError."""
        if model in (None, POLICY, self.name):
            return POLICY
        if model == BASE:
            return BASE
        match = _VERSION.fullmatch(str(model))
        if match is None:
            message = f"This service has the models {POLICY}, {BASE}, policy@vNNNNNN and {self.name}."
            raise ServiceError(404, message, "model_not_found", param="model")
        return int(match[1])

    def plan(self, ask: CompletionRequest | ChatRequest) -> Plan:
        """The job of a body. Raises ServiceError."""
        wanted = self.wanted(ask.model)
        # Before anything is tokenized, which takes time.
        if ask.num_prompts * ask.num_choices > MAX_CHOICES:
            message = f"A request has at most {MAX_CHOICES} choices: `n` times its prompts."
            raise ServiceError(400, message, "invalid_value", param="n")
        prompts = self._prompts(ask)
        given, fixed, gap = self._given(ask)
        key = secrets.randbits(63) if ask.seed is None else ask.seed
        requests = [
            self._request(ids, given, fixed, fold(key, index, choice))
            for index, ids in enumerate(prompts)
            for choice in range(ask.num_choices)
        ]
        length = requests[0].params.gen_length if gap is None else gap
        most_tokens = min(ask.most_tokens or length, length)
        job = Job(
            requests=tuple(requests),
            wanted=wanted,
            shows_canvas=ask.shows_canvas,
            # Who waits for the whole answer needs them only where it may end early.
            tells_blocks=bool(ask.stream or ask.stops or most_tokens < requests[0].params.gen_length),
            timeout_s=self._timeout_s,
        )
        return Plan(
            job=job,
            num_prompt_tokens=sum(map(len, prompts)),
            most_tokens=most_tokens,
            stops=ask.stops,
            num_gap_slots=gap,
            returns_step_map=ask.diffusion.return_step_map,
            includes_usage=ask.includes_usage,
        )

    def _prompts(self, ask: CompletionRequest | ChatRequest) -> list[list[int]]:
        if isinstance(ask, ChatRequest):
            return [self._codec.encode_chat([message.turn for message in ask.messages])]
        return [self._prompt(prompt, is_infill=ask.suffix is not None) for prompt in ask.prompts]

    def _prompt(self, prompt: str | list[int], *, is_infill: bool) -> list[int]:
        if not isinstance(prompt, str):
            return self._codec.check_ids(prompt, "prompt")
        return self._codec.encode_text(prompt, "prompt") if is_infill else self._codec.encode_turn(prompt)

    def _given(self, ask: CompletionRequest | ChatRequest) -> tuple[dict[str, Any], dict[int, int], int | None]:
        """What is asked of the sampler, the tokens that are given, and the slots of a gap."""
        diffusion = ask.diffusion
        values: dict[str, Any] = {
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "top_k": ask.top_k,
            "steps": diffusion.steps,
            "gen_length": diffusion.gen_length,
            "block_length": diffusion.block_length,
            "schedule": diffusion.remasking,
            "threshold": diffusion.threshold,
            "factor": diffusion.factor,
            "entropy_bound": diffusion.entropy_bound,
            "cfg_scale": diffusion.cfg_scale,
            "forbidden_ids": diffusion.constraints.forbidden_ids or None,
        }
        given = {name: value for name, value in values.items() if value is not None}
        if diffusion.cfg_scale:
            # Guidance has no cached forward, and a body has no word for caches.
            given["cache"] = "none"
        fixed = _fixed(diffusion.constraints.fixed)
        if not isinstance(ask, CompletionRequest) or ask.suffix is None:
            return given, fixed, None
        return self._with_suffix(given, fixed, ask.suffix, ask.most_tokens)

    def _with_suffix(
        self, given: dict[str, Any], fixed: dict[int, int], suffix: str, most_tokens: int | None
    ) -> tuple[dict[str, Any], dict[int, int], int]:
        """Infill: the gap, then the suffix, then ends of text up to a whole block."""
        if "gen_length" in given:
            message = "`diffusion.gen_length` follows from `max_tokens` and `suffix`; leave it out."
            raise ServiceError(400, message, "invalid_value", param="diffusion.gen_length")
        suffix_ids = self._codec.encode_text(suffix, "suffix")
        complete = self._defaults.complete([given], 1)
        block = int(complete["block_length"])
        gap = most_tokens or int(complete["gen_length"])
        length = -(-(gap + len(suffix_ids)) // max(1, block)) * max(1, block)
        if length > self._codec.config.max_sequence_length:
            raise self._too_long(len(suffix_ids) + gap, "suffix")
        padding = [self._codec.eos_id] * (length - gap - len(suffix_ids))
        if taken := [slot for slot in fixed if slot >= gap]:
            message = f"`diffusion.constraints.fixed` has slot {min(taken)}; the suffix follows slots 0 to {gap - 1}."
            raise ServiceError(400, message, "invalid_value", param="diffusion.constraints.fixed")
        fixed |= dict(enumerate([*suffix_ids, *padding], start=gap))
        # An end of text inside the gap ends nothing: the text goes on with the suffix.
        return given | {"gen_length": length, "stop_ids": ()}, fixed, gap

    def _request(self, ids: list[int], given: Mapping[str, Any], fixed: dict[int, int], seed: int) -> Request:
        try:
            params = to_params(self._defaults.complete([given], len(ids)))
            if len(ids) + params.gen_length > self._codec.config.max_sequence_length:
                raise self._too_long(len(ids), "prompt", params.gen_length)
            request = Request(prompt_ids=tuple(ids), params=params, seed=seed, fixed_tokens=fixed)
            check_request(request, self._codec.config)
        except (RequestError, ValueError) as error:
            sentence = renamed(str(error), _NAMES)
            field = _FIELD.search(sentence)
            raise ServiceError(
                400, f"{sentence}.", "invalid_value", param=field[1] if field is not None else None
            ) from error
        return request

    def _too_long(self, num_tokens: int, param: str, gen_length: int = 0) -> ServiceError:
        room = self._codec.config.max_sequence_length - gen_length
        message = f"The {param} has {num_tokens} tokens; this policy reads at most {room}."
        return ServiceError(400, message, "context_length_exceeded", param=param)


def _fixed(given: Mapping[str, int]) -> dict[int, int]:
    fixed = {}
    for slot, token in given.items():
        if not _SLOT.fullmatch(slot):
            message = "`diffusion.constraints.fixed`: slots are whole numbers from 0."
            raise ServiceError(400, message, "invalid_value", param="diffusion.constraints.fixed")
        fixed[int(slot)] = token
    return fixed
