"""Default sampling parameters: command options, else the checkpoint's run, else d1's defaults.

All values are keyed by the sampler's keys, see `parameters.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType
from typing import Any

from deploy.requests.parameters import SAMPLING_FIELDS, SAMPLING_KEYS, Values, values_of
from rollout.field_error import FieldError
from rollout.request import SCHEDULE_PARAMETER, Cache, SamplingParams, Schedule

_SCHEDULE_OF = {name: str(schedule) for schedule, name in SCHEDULE_PARAMETER.items()}
_TAKES: dict[str, tuple[str, ...]] = {schedule: (name,) for schedule, name in SCHEDULE_PARAMETER.items()}
_TAKES[Schedule.LEFT_TO_RIGHT] = ("threshold",)
_THRESHOLD = 0.9
_NOTHING_STATED: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """Default sampling parameters of a checkpoint, at temperature 0."""

    values: Values
    """Default values by the sampler's keys."""
    max_canvas_tokens: int | None
    """Maximum tokens of a canvas, to which the default length is cut; None: the length is not cut."""

    @classmethod
    def of_run(cls, sampling: SamplingParams) -> Defaults:
        """Return the parameters of the run's evaluation, at temperature 0."""
        return cls(values=_at_temperature_0(sampling), max_canvas_tokens=None)

    @classmethod
    def of_policy(
        cls, max_sequence_length: int, block_length: int | None = None, stated: Mapping[str, int] = _NOTHING_STATED
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
