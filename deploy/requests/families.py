"""The two policy families, masked diffusion and renoising (DiffusionGemma): defaults and checks of their requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deploy.requests.parameters import (
    RENOISING_KEYS,
    SAMPLING_FIELDS,
    SAMPLING_KEYS,
    Values,
    to_params,
    to_renoising_params,
    values_of,
)
from learner.model.checkpoint_files import generation_defaults, load_config
from learner.model.config import TransformerConfig
from learner.model.renoising.config import MODEL_TYPE, RenoisingConfig, is_renoising, read_renoising_config
from rollout.field_error import FieldError
from rollout.grammar.grammar import Grammar
from rollout.renoising.request import RenoisingParams, RenoisingRequest, check_renoising_request
from rollout.request import (
    SCHEDULE_PARAMETER,
    Cache,
    Request,
    SamplingParams,
    Schedule,
    canvas_of,
)
from rollout.request_checks import check_request

AnyRequest = Request | RenoisingRequest
AnyConfig = TransformerConfig | RenoisingConfig

_SCHEDULE_OF = {name: str(schedule) for schedule, name in SCHEDULE_PARAMETER.items()}
_TAKES: dict[str, tuple[str, ...]] = {schedule: (name,) for schedule, name in SCHEDULE_PARAMETER.items()}
_TAKES[Schedule.LEFT_TO_RIGHT] = ("threshold",)
_THRESHOLD = 0.9
# Values of other policies' parameters that disable them.
_NOTHING = {"top_p": 1, "top_k": 0, "cfg_scale": 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """Default sampling parameters of a policy with a mask token, at temperature 0."""

    values: Values
    """Default values by their names in requests."""
    max_canvas_tokens: int | None
    """Maximum tokens of a canvas, to which the default length is cut; None: the length is not cut."""

    @classmethod
    def of_run(cls, sampling: SamplingParams) -> Defaults:
        """Return the parameters of the run's evaluation, at temperature 0."""
        return cls(values=_at_temperature_0(sampling), max_canvas_tokens=None)

    @classmethod
    def of_policy(
        cls, max_sequence_length: int, block_length: int | None = None, stated: Mapping[str, int] = MappingProxyType({})
    ) -> Defaults:
        """Return d1's defaults for a policy, with the length limited by its context.

        A block-causal policy uses its own blocks. Each step commits all slots above a threshold, as in SDAR and LLaDA2.

        Args:
            max_sequence_length: context length of the policy, in tokens.
            block_length: slots of a block of a block-causal policy; None: bidirectional attention.
            stated: `max_new_tokens`, `block_length` and `steps_per_block` that the checkpoint states, see
                `generation_defaults`. The length is cut to whole blocks; a block-causal policy keeps its own blocks.
        """
        params = SamplingParams()
        length = stated.get("max_new_tokens", params.gen_length)
        if block_length is not None:
            params = SamplingParams(
                gen_length=length, block_length=block_length, steps_per_block=block_length, threshold=_THRESHOLD
            )
        elif stated:
            block = min(stated.get("block_length", params.block_length), length)
            length = length // block * block
            params = SamplingParams(
                gen_length=length,
                block_length=block,
                num_denoise_steps=_default_steps(length, block),
                steps_per_block=stated.get("steps_per_block"),
            )
        return cls(values=_at_temperature_0(params), max_canvas_tokens=max_sequence_length)

    def complete(self, layers: Sequence[Values], num_prompt_tokens: int) -> dict[str, Any]:
        """Complete the values of a request with the defaults. Later layers override earlier ones.

        Raises FieldError for a key of policies without a mask token.
        """
        values, given = reduce(overlay, layers, dict(self.values)), frozenset[str]().union(*layers)
        if strays := [key for key in SAMPLING_FIELDS if key in given and key not in SAMPLING_KEYS]:
            raise FieldError(
                f"{{{strays[0]}}} is for policies without a mask token, and this one fills masked slots: leave it out"
            )
        if "gen_length" not in given and self.max_canvas_tokens is not None:
            values["gen_length"] = _fitting_length(
                values, "block_length" in given, self.max_canvas_tokens - num_prompt_tokens
            )
        if "block_length" not in given:
            values["block_length"] = min(values["block_length"], values["gen_length"])
        shape = ("gen_length", "block_length")
        if "steps_per_block" in values:
            if "steps_per_block" not in given:
                values["steps_per_block"] = max(1, min(values["steps_per_block"], values["block_length"]))
        elif "steps" not in given and any(values[key] != self.values[key] for key in shape):
            values["steps"] = _default_steps(values["gen_length"], values["block_length"])
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class RenoisingDefaults:
    """Default sampling parameters of a policy without a mask token: those of the original code."""

    config: RenoisingConfig
    """Model config of the policy."""

    def complete(self, layers: Sequence[Values], num_prompt_tokens: int) -> dict[str, Any]:
        """Complete the values of a request with the defaults. Later layers override earlier ones.

        Raises FieldError for a key that this family does not support.
        """
        given = {key: value for layer in layers for key, value in layer.items()}
        for key in [key for key, value in given.items() if value == _NOTHING.get(key)]:
            del given[key]
        block = given.pop("block_length", self.config.canvas_length)
        if block != self.config.canvas_length:
            raise FieldError(
                f"{{block_length}} {block} is not the {self.config.canvas_length} slots of this policy's canvases; "
                "leave it out"
            )
        _check_keys(given)
        return {"gen_length": self._fitting_length(num_prompt_tokens)} | given

    def _fitting_length(self, num_prompt_tokens: int) -> int:
        """Return the default length, cut to the whole canvases that fit; one canvas if none fits."""
        num_slots = self.config.canvas_length
        room = (self.config.max_sequence_length - num_prompt_tokens) // num_slots * num_slots
        return min(RenoisingParams().gen_length, room) if room > 0 else num_slots


AnyDefaults = Defaults | RenoisingDefaults


def make_request(
    defaults: AnyDefaults,
    prompt_ids: Sequence[int],
    layers: Sequence[Values],
    *,
    seed: int,
    fixed: Mapping[int, int],
    grammar: Grammar | None,
) -> AnyRequest:
    """Create a request of the layers and the defaults. Raises FieldError or ValidationError."""
    values, ids = defaults.complete(layers, len(prompt_ids)), tuple(prompt_ids)
    if isinstance(defaults, Defaults):
        return Request(prompt_ids=ids, params=to_params(values), seed=seed, fixed_tokens=dict(fixed), grammar=grammar)
    assert grammar is None, "the planner refuses structured output"
    _check_keys({"fixed_tokens"} if fixed else ())
    stop_ids = values.pop("stop_ids", None)
    params = to_renoising_params(values)
    return RenoisingRequest(
        prompt_ids=ids, params=params, seed=seed, stop_ids=None if stop_ids is None else tuple(stop_ids)
    )


def defaults_of(checkpoint: Path, config: AnyConfig, evaluated: SamplingParams | None) -> AnyDefaults:
    """Return the default parameters of a checkpoint; `evaluated` are those of its run's evaluation, if it has a run.

    Raises ValueError if its `generation_config.json` is invalid.
    """
    if isinstance(config, RenoisingConfig):
        return RenoisingDefaults(config=config)
    if evaluated is not None:
        return Defaults.of_run(evaluated)
    return Defaults.of_policy(config.max_sequence_length, config.block_length, generation_defaults(checkpoint))


def read_config(directory: Path) -> AnyConfig:
    """Read the model config of a checkpoint of either family. Raises ValueError if it is not a checkpoint."""
    return read_renoising_config(directory) if is_renoising(directory) else load_config(directory)


def check_any_request(request: AnyRequest, config: AnyConfig) -> None:
    """Check that the policy can serve a request.

    Raises FieldError, naming the field, if it cannot, and ValueError if the request is for the other policy family.
    """
    if isinstance(request, Request) and isinstance(config, TransformerConfig):
        check_request(request, config)
    elif isinstance(request, RenoisingRequest) and isinstance(config, RenoisingConfig):
        check_renoising_request(request, config)
    else:
        raise ValueError(f"a {type(request).__name__} is not for the policy here")


def block_length_of(request: AnyRequest, config: AnyConfig) -> int:
    """Return the number of slots that finish together: those of a block, or of a canvas."""
    if isinstance(request, RenoisingRequest):
        assert isinstance(config, RenoisingConfig), "it was made for this policy"
        return config.canvas_length
    return request.params.block_length


def num_slots_of(request: AnyRequest, config: AnyConfig) -> int:
    """Return the completion slots of a request, including the surplus of its last block or canvas."""
    if isinstance(request, RenoisingRequest):
        return request.num_slots(block_length_of(request, config))
    assert isinstance(config, TransformerConfig), "it was made for this policy"
    return canvas_of(request, config).num_slots


def overlay(lower: Values, upper: Values) -> dict[str, Any]:
    """Merge two layers; `upper` overrides `lower`.

    Values of `lower` that no longer apply are dropped. A schedule in `upper`, given or implied by its parameter, drops
    the parameters of other schedules. `steps` drops `steps_per_block`. `cache: none` drops `cache_refresh_steps`.
    """
    kept = dict(lower)
    parameters = [key for key in _SCHEDULE_OF if key in upper]
    if "schedule" in upper or parameters:
        schedule = upper.get("schedule") or _named(kept.get("schedule"), parameters)
        taken = _TAKES.get(schedule, ())
        kept = {key: value for key, value in kept.items() if key not in _SCHEDULE_OF or key in taken}
        kept["schedule"] = schedule
    if "steps" in upper:
        kept.pop("steps_per_block", None)
    if upper.get("cache") == Cache.NONE:
        kept.pop("cache_refresh_steps", None)
    return kept | dict(upper)


def _named(schedule: str | None, parameters: list[str]) -> str:
    """Return the current schedule if it takes all parameters, else the schedule of the first parameter."""
    if schedule is not None and set(parameters) <= set(_TAKES.get(schedule, ())):
        return schedule
    return _SCHEDULE_OF[parameters[0]]


def _at_temperature_0(sampling: SamplingParams) -> dict[str, Any]:
    return values_of(sampling) | {"temperature": 0.0}


def _fitting_length(values: Values, is_block_given: bool, room: int) -> int:
    """Return the default length, cut to the whole blocks that fit. If none fits: the given block, else the room."""
    length, block = min(values["gen_length"], room), max(1, values["block_length"])
    whole = length // block * block
    return whole if whole > 0 else max(1, block if is_block_given else length)


def _default_steps(gen_length: int, block_length: int) -> int:
    """Return one step per two tokens, but at least one per block."""
    return max(1, gen_length // max(1, block_length)) * max(1, block_length // 2)


def _check_keys(given: Iterable[str]) -> None:
    """Raise FieldError for a key that policies without a mask token do not have."""
    for key in given:
        if key not in RENOISING_KEYS:
            taken = ", ".join(f"{{{name}}}" for name in RENOISING_KEYS)
            raise FieldError(f"{{{key}}} is not for {MODEL_TYPE} policies; they take {taken}")
