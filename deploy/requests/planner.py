"""Planner: converts a request body or a `d1 sample` line to sampler requests, or rejects it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import ValidationError

from deploy.recipe.validation_errors import shortened
from deploy.requests.body import MAX_CHOICES, ChatRequest, CompletionBody, CompletionRequest
from deploy.requests.codec import Codec
from deploy.requests.errors import RequestError, request_error_of
from deploy.requests.families import (
    AnyDefaults,
    AnyRequest,
    Defaults,
    RenoisingDefaults,
    block_length_of,
    check_any_request,
    make_request,
)
from deploy.requests.parameters import Values, sampler_names
from learner.model.config import TransformerConfig
from learner.model.renoising.config import MODEL_TYPE
from rollout.field_error import FieldError
from rollout.grammar.grammar import Grammar
from rollout.renoising.request import RenoisingParams, RenoisingRequest
from rollout.request import Request, SamplingParams

_SLOT = re.compile("0|[1-9][0-9]{0,17}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPlan:
    """Sampler requests of one body."""

    body: CompletionBody
    """The request body, which says what the answer contains."""
    requests: tuple[AnyRequest, ...]
    """One sampler request for each choice."""
    block_length: int
    """Slots that finish together: those of a block, or of a canvas."""
    is_block_causal: bool
    """Whether blocks are counted from the first slot of the prompt."""
    num_prompt_tokens: int
    """Tokens of all prompts, including the chat template."""
    most_tokens: int
    """Maximum tokens of each text."""
    num_gap_slots: int | None
    """Infill: slots before the suffix; None without a suffix."""

    @property
    def includes_stop(self) -> bool:
        """Whether a text includes the stop string or id that ended it."""
        return self.body.includes_stop and self.grammar is None

    @property
    def grammar(self) -> Grammar | None:
        """Grammar that each text matches completely; None: unconstrained."""
        first = self.requests[0]
        return first.grammar if isinstance(first, Request) else None

    @property
    def masked_requests(self) -> tuple[Request, ...]:
        """The requests, for a policy with a mask token."""
        requests = tuple(request for request in self.requests if isinstance(request, Request))
        assert len(requests) == len(self.requests), "the policy has one"
        return requests

    @property
    def num_slots(self) -> int:
        """Completion slots of each choice; all choices have the same parameters."""
        return self.requests[0].params.gen_length

    @property
    def stop_ids(self) -> tuple[int, ...] | None:
        """Ids that end a text; None: the policy's."""
        first = self.requests[0]
        return first.stop_ids if isinstance(first, RenoisingRequest) else first.params.stop_ids

    @property
    def num_forwards_of_step(self) -> int:
        """Forwards per denoise step: two with classifier-free guidance."""
        first = self.requests[0]
        return 2 if isinstance(first, Request) and first.params.cfg_scale else 1

    def num_steps(self, choice: int) -> int | None:
        """Return the denoise steps of a choice that fills its canvas; None if not known in advance."""
        request = self.requests[choice]
        if isinstance(request, RenoisingRequest) or self._num_given(choice) or self.grammar is not None:
            return None
        return request.params.fixed_num_steps

    def num_blocks(self, choice: int, num_slots: int) -> int:
        """Return the blocks of a choice's first `num_slots` slots, which are whole blocks."""
        return -(-(self._num_given(choice) + num_slots) // self.block_length) if num_slots else 0

    def _num_given(self, choice: int) -> int:
        """Return the prompt tokens in a choice's first block."""
        return len(self.requests[choice].prompt_ids) % self.block_length if self.is_block_causal else 0


class Planner:
    """Planner of the requests to one policy."""

    def __init__(
        self, codec: Codec, defaults: AnyDefaults, given: Values | None = None, seed: int | None = None
    ) -> None:
        """Create a planner. `given` and `seed` apply to requests that leave them out; by default a seed is random."""
        self._codec, self._defaults, self._given, self._seed = codec, defaults, given or {}, seed

    def plan(self, body: CompletionBody, names: Mapping[str, str] | None = None) -> RequestPlan:
        """Plan a request. Raises RequestError, with field names from `names`, by default those of the body."""
        # Checked before tokenization, which takes time.
        if body.num_prompts * body.num_choices > MAX_CHOICES:
            raise RequestError(f"A request has at most {MAX_CHOICES} choices: `n` times its prompts", param="n")
        try:
            return self._plan(body)
        except (FieldError, ValidationError) as error:
            model = RenoisingParams if isinstance(self._defaults, RenoisingDefaults) else SamplingParams
            raise request_error_of(error, model, sampler_names(names or body.names)) from error

    def check(self, request: AnyRequest) -> None:
        """Raise FieldError if the policy cannot serve the request."""
        check_any_request(request, self._codec.config)

    def _plan(self, body: CompletionBody) -> RequestPlan:
        prompts = self._prompts(body)
        ends = self._stop_ids(body)
        layers, fixed, gap = [self._given, *body.parameter_layers], _fixed(body.fixed), None
        if ends is not None:
            layers = [{"stop_ids": ends}, *layers]
        if isinstance(body, CompletionRequest) and body.suffix is not None:
            layers, fixed, gap = self._with_suffix(body, body.suffix, layers, fixed)
        seed = body.seed if body.seed is not None else self._seed
        seeds = body.seeds(secrets.randbits(63) if seed is None else seed)
        choices = [ids for ids in prompts for _ in range(body.num_choices)]
        grammar = self._grammar(body)
        requests = tuple[AnyRequest, ...](
            make_request(self._defaults, ids, layers, seed=seed, fixed=fixed, grammar=grammar)
            for ids, seed in zip(choices, seeds, strict=True)
        )
        for request in requests:
            self.check(request)
        first, config = requests[0], self._codec.config
        length = first.params.gen_length if gap is None else gap
        return RequestPlan(
            body=body,
            requests=requests,
            block_length=block_length_of(first, config),
            is_block_causal=isinstance(config, TransformerConfig) and config.is_block_causal,
            num_prompt_tokens=sum(map(len, prompts)),
            most_tokens=min(body.most_tokens or length, length),
            num_gap_slots=gap,
        )

    def _grammar(self, body: CompletionBody) -> Grammar | None:
        structure = body.structure
        if structure is None:
            return None
        if not isinstance(self._defaults, Defaults):
            message = f"`{structure.field}` is not for {MODEL_TYPE} policies: their canvases have no masked slots"
            raise RequestError(message, "unsupported_parameter", param=structure.field)
        if isinstance(body, CompletionRequest) and body.suffix is not None:
            raise RequestError(f"`suffix` is not for `{structure.field}`, which covers the whole text", param="suffix")
        grammar = self._codec.grammar(structure)
        return grammar if body.most_tokens is None else replace(grammar, most_tokens=body.most_tokens)

    def _prompts(self, body: CompletionBody) -> list[list[int]]:
        codec = self._codec
        if isinstance(body, ChatRequest):
            options = body.template_variables
            return [codec.encode_chat(body.turns, template=options, adds_special=body.add_special_tokens)]
        assert isinstance(body, CompletionRequest), "there are two kinds"
        return [
            codec.encode_prompt(prompt, adds_special=body.add_special_tokens)
            if isinstance(prompt, str)
            else codec.check_ids(prompt)
            for prompt in body.prompts
        ]

    def _stop_ids(self, body: CompletionBody) -> tuple[int, ...] | None:
        """Return the ids that end the text; None: only the policy's own."""
        if not body.ignore_eos and not body.stop_token_ids:
            return None
        own = () if body.ignore_eos else self._codec.config.stop_ids
        return tuple(dict.fromkeys((*own, *body.stop_token_ids)))

    def _with_suffix(
        self, body: CompletionRequest, suffix: str, layers: list[Values], fixed: dict[int, int]
    ) -> tuple[list[Values], dict[int, int], int]:
        """Fix the suffix after the gap (infill), padded with end-of-text tokens to a whole block."""
        config = self._codec.config
        if not isinstance(config, TransformerConfig) or not isinstance(self._defaults, Defaults):
            raise RequestError(f"`suffix` is not for {MODEL_TYPE} policies, which fill no gaps", param="suffix")
        if any("gen_length" in layer for layer in body.parameter_layers):
            raise FieldError("`{gen_length}` follows from `max_tokens` and `suffix`; leave it out")
        suffix_ids = self._codec.encode_text(suffix, "suffix")
        complete = self._defaults.complete(layers, 1)
        block = max(1, int(complete["block_length"]))
        gap = body.most_tokens or int(complete["gen_length"])
        length = -(-(gap + len(suffix_ids)) // block) * block
        most = config.max_sequence_length
        if length > most:
            said = "" if body.most_tokens else ", as many as without `max_tokens`; say how many belong there"
            sentence = (
                f"The suffix of {len(suffix_ids)} tokens and a gap of {gap} make more than the {most} that this policy "
                f"reads{said}"
            )
            raise RequestError(sentence, "context_length_exceeded", param="suffix")
        padding = [config.eos_token_id] * (length - gap - len(suffix_ids))
        if taken := [slot for slot in fixed if slot >= gap]:
            raise FieldError(f"`{{fixed_tokens}}` has slot {min(taken)}; the suffix follows slots 0 to {gap - 1}")
        # An end-of-text token inside the gap must not end the text, which continues with the suffix.
        canvas = {"gen_length": length, "stop_ids": ()}
        return [*layers, canvas], fixed | dict(enumerate([*suffix_ids, *padding], start=gap)), gap


def _fixed(given: Mapping[str, int]) -> dict[int, int]:
    for slot in given:
        if not _SLOT.fullmatch(slot):
            raise FieldError(
                "{fixed_tokens} has slot {slot}; slots are whole numbers from 0", slot=shortened(repr(slot))
            )
    return {int(slot): token for slot, token in given.items()}
