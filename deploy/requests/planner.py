"""The planner: makes of a body, or of a line of `d1 sample`, what the sampler takes, or says why not."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pydantic import ValidationError

from deploy.recipe.refusals import shortened
from deploy.requests.any_request import AnyConfig, AnyRequest, block_length_of, check_any_request
from deploy.requests.body import MAX_CHOICES, Ask, ChatRequest, CompletionRequest
from deploy.requests.defaults import Defaults
from deploy.requests.parameters import RENOISING_KEYS, Values, sampler_names, to_params, to_renoising_params
from deploy.requests.refusals import RequestError, refusal_of
from deploy.requests.renoising import RenoisingDefaults, check_keys
from deploy.requests.responses import ResponsesRequest
from deploy.requests.structured.structure import Structure
from learner.model.config import TransformerConfig
from learner.model.renoising.config import MODEL_TYPE
from rollout.field_error import FieldError
from rollout.grammar.grammar import Grammar
from rollout.renoising.request import RenoisingParams, RenoisingRequest
from rollout.request import Request, SamplingParams

_SLOT = re.compile("0|[1-9][0-9]{0,17}")


class Codec(Protocol):
    """How a policy reads. What it does not read it refuses, by an error of its own or a FieldError of `prompt_ids`."""

    @property
    def config(self) -> AnyConfig:
        """The shape of the policy."""

    def encode_prompt(self, text: str, *, adds_special: bool) -> list[int]:
        """The prompt that a text is; with what the tokenizer puts around every text if asked to."""

    def encode_chat(
        self, messages: Sequence[dict[str, str]], param: str, *, template: Mapping[str, Any], adds_special: bool
    ) -> list[int]:
        """The prompt of a conversation, which is the field `param`; `template` are variables of the chat template."""

    def encode_text(self, text: str, param: str) -> list[int]:
        """The ids of a text by itself, which is the field `param`."""

    def check_ids(self, ids: Sequence[int], param: str) -> list[int]:
        """Ids that may be a prompt, which is the field `param`."""

    def grammar(self, structure: Structure) -> Grammar:
        """What a structure allows, in the policy's tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPlan:
    """What the sampler is asked for, and what the answer needs to know."""

    requests: tuple[AnyRequest, ...]
    """One for each choice."""
    block_length: int
    """Slots that are finished together: of a block, or of a canvas."""
    is_block_causal: bool
    """Whether blocks are counted from the first slot of the prompt."""
    num_prompt_tokens: int
    """Of all prompts, the chat template included."""
    most_tokens: int
    """Tokens of each text, at most."""
    stops: tuple[str, ...]
    """A text ends at the first of these."""
    includes_stop: bool
    """Whether a text has what ended it, a string or an id."""
    num_gap_slots: int | None
    """Infill: slots before the suffix; None where there is no suffix."""
    returns_step_map: bool
    """Whether each choice comes with its steps and confidences."""
    returns_logprobs: bool
    """Whether each choice comes with the log-probabilities of its tokens."""
    shows_canvas: bool
    """Whether a stream is of canvases."""
    includes_usage: bool
    """Whether a stream ends with the usage."""

    @property
    def grammar(self) -> Grammar | None:
        """Which texts they may be: each is one of them, and complete."""
        first = self.requests[0]
        return first.grammar if isinstance(first, Request) else None

    @property
    def masked_requests(self) -> tuple[Request, ...]:
        """Those to a policy with a mask token."""
        requests = tuple(request for request in self.requests if isinstance(request, Request))
        assert len(requests) == len(self.requests), "the policy has one"
        return requests

    @property
    def num_slots(self) -> int:
        """Slots of each text; all choices are denoised alike."""
        return self.requests[0].params.gen_length

    @property
    def stop_ids(self) -> tuple[int, ...] | None:
        """Ids that end a text; None for the policy's."""
        first = self.requests[0]
        return first.stop_ids if isinstance(first, RenoisingRequest) else first.params.stop_ids

    @property
    def num_forwards_of_step(self) -> int:
        """Two with classifier-free guidance."""
        first = self.requests[0]
        return 2 if isinstance(first, Request) and first.params.cfg_scale else 1

    def num_steps(self, choice: int) -> int | None:
        """Denoise steps of a choice that fills its canvas; None where they are not known beforehand."""
        request = self.requests[choice]
        if isinstance(request, RenoisingRequest) or self._num_given(choice) or self.grammar is not None:
            return None
        return request.params.known_num_steps

    def num_blocks(self, choice: int, num_slots: int) -> int:
        """Blocks of a choice's first slots, which are whole blocks."""
        return -(-(self._num_given(choice) + num_slots) // self.block_length) if num_slots else 0

    def _num_given(self, choice: int) -> int:
        """Slots of the prompt's in a choice's first block."""
        return len(self.requests[choice].prompt_ids) % self.block_length if self.is_block_causal else 0


class Planner:
    """Makes the plans of one policy."""

    def __init__(
        self,
        codec: Codec,
        defaults: Defaults | RenoisingDefaults,
        given: Values | None = None,
        seed: int | None = None,
    ) -> None:
        """Plan for a policy.

        Args:
            codec: how it reads.
            defaults: how it is sampled if nothing else is said.
            given: what is said of all requests, before what they say themselves.
            seed: of requests without one; None draws one for each.
        """
        self._codec, self._defaults, self._given, self._seed = codec, defaults, given or {}, seed

    def plan(self, ask: Ask, names: Mapping[str, str] | None = None) -> RequestPlan:
        """What a body asks for. Raises RequestError, with `names` for the fields; by default those of the body."""
        # Before anything is tokenized, which takes time.
        if ask.num_prompts * ask.num_choices > MAX_CHOICES:
            raise RequestError(f"A request has at most {MAX_CHOICES} choices: `n` times its prompts", param="n")
        try:
            return self._plan(ask)
        except (FieldError, ValidationError) as error:
            model = RenoisingParams if isinstance(self._defaults, RenoisingDefaults) else SamplingParams
            raise refusal_of(error, model, sampler_names(names or ask.names)) from error

    def check(self, request: AnyRequest) -> None:
        """Raise FieldError for what the policy cannot serve."""
        check_any_request(request, self._codec.config)

    def _plan(self, ask: Ask) -> RequestPlan:
        prompts = self._prompts(ask)
        ends = self._stop_ids(ask)
        layers, fixed, gap = [self._given, *ask.layers], _fixed(ask.fixed), None
        if ends is not None and isinstance(self._defaults, Defaults):
            layers = [{"stop_ids": ends}, *layers]
        if isinstance(ask, CompletionRequest) and ask.suffix is not None:
            layers, fixed, gap = self._with_suffix(ask, ask.suffix, layers, fixed)
        seed = ask.seed if ask.seed is not None else self._seed
        seeds = ask.seeds(secrets.randbits(63) if seed is None else seed)
        choices = [ids for ids in prompts for _ in range(ask.num_choices)]
        grammar = self._grammar(ask)
        requests = tuple(
            self._request(ids, layers, fixed=fixed, seed=seed, stop_ids=ends, grammar=grammar)
            for ids, seed in zip(choices, seeds, strict=True)
        )
        first, config = requests[0], self._codec.config
        length = first.params.gen_length if gap is None else gap
        return RequestPlan(
            requests=requests,
            block_length=block_length_of(first, config),
            is_block_causal=isinstance(config, TransformerConfig) and config.is_block_causal,
            num_prompt_tokens=sum(map(len, prompts)),
            most_tokens=min(ask.most_tokens or length, length),
            stops=ask.stops,
            includes_stop=ask.includes_stop and grammar is None,
            num_gap_slots=gap,
            returns_step_map=ask.diffusion.return_step_map,
            returns_logprobs=ask.returns_logprobs,
            shows_canvas=ask.shows_canvas,
            includes_usage=ask.includes_usage,
        )

    def _grammar(self, ask: Ask) -> Grammar | None:
        structure = ask.structure
        if structure is None:
            return None
        if not isinstance(self._defaults, Defaults):
            message = f"`{structure.field}` is not for {MODEL_TYPE} policies: their canvases have no masked slots"
            raise RequestError(message, "unsupported_parameter", param=structure.field)
        if isinstance(ask, CompletionRequest) and ask.suffix is not None:
            raise RequestError(f"`suffix` is not for `{structure.field}`, which says all of a text", param="suffix")
        grammar = self._codec.grammar(structure)
        return grammar if ask.most_tokens is None else replace(grammar, most_tokens=ask.most_tokens)

    def _prompts(self, ask: Ask) -> list[list[int]]:
        if isinstance(ask, ChatRequest):
            adds_special = ask.add_special_tokens
            return [self._codec.encode_chat(ask.turns, "messages", template=ask.template, adds_special=adds_special)]
        if isinstance(ask, ResponsesRequest):
            return [self._codec.encode_chat(ask.turns, "input", template=ask.template, adds_special=False)]
        assert isinstance(ask, CompletionRequest), "there are three kinds"
        return [self._prompt(prompt, ask) for prompt in ask.prompts]

    def _prompt(self, prompt: str | list[int], ask: CompletionRequest) -> list[int]:
        if not isinstance(prompt, str):
            return self._codec.check_ids(prompt, "prompt")
        return self._codec.encode_prompt(prompt, adds_special=ask.add_special_tokens)

    def _stop_ids(self, ask: Ask) -> tuple[int, ...] | None:
        """The ids that end its text; None for the policy's own alone."""
        if not ask.ignore_eos and not ask.stop_token_ids:
            return None
        own = () if ask.ignore_eos else self._codec.config.stop_ids
        return tuple(dict.fromkeys((*own, *ask.stop_token_ids)))

    def _with_suffix(
        self, ask: CompletionRequest, suffix: str, layers: list[Values], fixed: dict[int, int]
    ) -> tuple[list[Values], dict[int, int], int]:
        """Infill: the gap, then the suffix, then ends of text up to a whole block."""
        config = self._codec.config
        if not isinstance(config, TransformerConfig) or not isinstance(self._defaults, Defaults):
            raise RequestError(f"`suffix` is not for {MODEL_TYPE} policies, which fill no gaps", param="suffix")
        if any("gen_length" in layer for layer in ask.layers):
            raise FieldError("`{gen_length}` follows from `max_tokens` and `suffix`; leave it out")
        suffix_ids = self._codec.encode_text(suffix, "suffix")
        complete = self._defaults.complete(layers, 1)
        block = max(1, int(complete["block_length"]))
        gap = ask.most_tokens or int(complete["gen_length"])
        length = -(-(gap + len(suffix_ids)) // block) * block
        most = config.max_sequence_length
        if length > most:
            said = "" if ask.most_tokens else ", as many as without `max_tokens`; say how many belong there"
            sentence = (
                f"The suffix of {len(suffix_ids)} tokens and a gap of {gap} make more than the {most} that this policy "
                f"reads{said}"
            )
            raise RequestError(sentence, "context_length_exceeded", param="suffix")
        padding = [config.eos_token_id] * (length - gap - len(suffix_ids))
        if taken := [slot for slot in fixed if slot >= gap]:
            raise FieldError(f"`{{fixed_tokens}}` has slot {min(taken)}; the suffix follows slots 0 to {gap - 1}")
        # An end of text inside the gap ends nothing: the text goes on with the suffix.
        canvas = {"gen_length": length, "stop_ids": ()}
        return [*layers, canvas], fixed | dict(enumerate([*suffix_ids, *padding], start=gap)), gap

    def _request(
        self,
        ids: list[int],
        layers: Sequence[Values],
        *,
        fixed: dict[int, int],
        seed: int,
        stop_ids: tuple[int, ...] | None,
        grammar: Grammar | None,
    ) -> AnyRequest:
        values, prompt = self._defaults.complete(layers, len(ids)), tuple(ids)
        request: AnyRequest
        if isinstance(self._defaults, Defaults):
            params = to_params(values)
            request = Request(prompt_ids=prompt, params=params, seed=seed, fixed_tokens=fixed, grammar=grammar)
        else:
            check_keys(["fixed_tokens"] if fixed else [], RENOISING_KEYS)
            of_canvas = to_renoising_params(values)
            request = RenoisingRequest(prompt_ids=prompt, params=of_canvas, seed=seed, stop_ids=stop_ids)
        self.check(request)
        return request


def _fixed(given: Mapping[str, int]) -> dict[int, int]:
    for slot in given:
        if not _SLOT.fullmatch(slot):
            raise FieldError(
                "{fixed_tokens} has slot {slot}; slots are whole numbers from 0", slot=shortened(repr(slot))
            )
    return {int(slot): token for slot, token in given.items()}
