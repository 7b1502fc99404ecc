"""What a request leaves out: it comes from the command's options, then from the checkpoint's run, then from d1.

Everything here goes by the sampler's keys, as `parameters.py` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from deploy.requests.parameters import ALL_KEYS, SAMPLING_KEYS, Values, values_of
from rollout.field_error import FieldError
from rollout.request import PARAMETER_OF, Cache, SamplingParams, Schedule

_SCHEDULE_OF = {name: str(schedule) for schedule, name in PARAMETER_OF.items()}
_TAKES: dict[str, tuple[str, ...]] = {schedule: (name,) for schedule, name in PARAMETER_OF.items()}
_TAKES[Schedule.LEFT_TO_RIGHT] = ("threshold",)
_SURE = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """How a checkpoint is sampled if nothing else is said: at temperature 0."""

    values: Values
    """By the sampler's keys."""
    room: int | None
    """Tokens that a canvas may have, where the default length is cut to them; None leaves the length as it is."""

    @classmethod
    def of_run(cls, sampling: SamplingParams) -> Defaults:
        """As the run sampled when it was evaluated."""
        return cls(values=_at_temperature_0(sampling), room=None)

    @classmethod
    def of_policy(
        cls, max_sequence_length: int, block_length: int | None = None, gen_length: int | None = None
    ) -> Defaults:
        """d1's own, no longer than the policy takes; of a block-causal one in its own blocks, all of a block that it is
        sure of at once (as SDAR and LLaDA2 are decoded).

        Args:
            max_sequence_length: tokens that the policy takes.
            block_length: slots of a block of a block-causal policy; None: every slot sees every other.
            gen_length: the length that the checkpoint states. It is one block where d1's own does not divide it.
        """
        params = SamplingParams()
        length = gen_length or params.gen_length
        if block_length is not None:
            params = SamplingParams(
                gen_length=length, block_length=block_length, steps_per_block=block_length, threshold=_SURE
            )
        elif gen_length is not None:
            block = length if length % params.block_length else params.block_length
            steps = _half_as_many_steps(length, block)
            params = SamplingParams(gen_length=length, block_length=block, num_denoise_steps=steps)
        return cls(values=_at_temperature_0(params), room=max_sequence_length)

    def complete(self, layers: Sequence[Values], num_prompt_tokens: int) -> dict[str, Any]:
        """The values of a request that gives some of them; of two layers the later counts. Raises FieldError for a key
        that is for policies without a mask token."""
        values, given = reduce(overlay, layers, dict(self.values)), frozenset[str]().union(*layers)
        if strays := [key for key in ALL_KEYS if key in given and key not in SAMPLING_KEYS]:
            raise FieldError(
                f"{{{strays[0]}}} is for policies without a mask token, and this one fills masked slots: leave it out"
            )
        if "gen_length" not in given and self.room is not None:
            values["gen_length"] = _fitting(values, "block_length" in given, self.room - num_prompt_tokens)
        if "block_length" not in given:
            values["block_length"] = self._block_of(values["gen_length"])
        shape = ("gen_length", "block_length")
        if "steps_per_block" in values:
            if "steps_per_block" not in given:
                values["steps_per_block"] = max(1, min(values["steps_per_block"], values["block_length"]))
        elif "steps" not in given and any(values[key] != self.values[key] for key in shape):
            values["steps"] = _half_as_many_steps(values["gen_length"], values["block_length"])
        return values

    def _block_of(self, gen_length: int) -> int:
        """The default block of another length: a canvas of one block stays one where that block does not divide it."""
        block = int(self.values["block_length"])
        is_one = block == self.values["gen_length"] and gen_length % block != 0
        return gen_length if is_one else min(block, gen_length)


def overlay(lower: Values, upper: Values) -> dict[str, Any]:
    """The values of both, those of `upper` first.

    What belongs together is replaced together: a schedule that is given, or named by its parameter, takes along no
    parameter of another one, steps in all no steps of a block, and a request without cache no refreshes.
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
    """The schedule that takes all parameters: the one there is, or that of the first."""
    if schedule is not None and set(parameters) <= set(_TAKES.get(schedule, ())):
        return schedule
    return _SCHEDULE_OF[parameters[0]]


def _at_temperature_0(sampling: SamplingParams) -> dict[str, Any]:
    return values_of(sampling) | {"temperature": 0.0}


def _fitting(values: Values, is_block_given: bool, room: int) -> int:
    """The longest completion of whole blocks up to the default length that has room; else whatever there is."""
    length, block = min(values["gen_length"], room), max(1, values["block_length"])
    whole = length // block * block
    return whole if whole > 0 else max(1, block if is_block_given else length)


def _half_as_many_steps(gen_length: int, block_length: int) -> int:
    """One step for two tokens, but one for each block at least."""
    return max(1, gen_length // max(1, block_length)) * max(1, block_length // 2)
