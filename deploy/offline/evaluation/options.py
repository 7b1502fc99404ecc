"""Evaluation options, and the sampling parameters for each combination of length and schedule."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from deploy.errors import UserError
from deploy.recipe.recipe import Recipe
from deploy.requests.errors import request_error_of
from deploy.requests.families import Defaults, RenoisingDefaults
from deploy.requests.parameters import Values, sampler_names, to_params, to_renoising_params, values_of
from learner.model.config import TransformerConfig
from learner.model.renoising.config import MODEL_TYPE, RenoisingConfig
from rewards.first_d1 import evaluation as first_d1
from rewards.problem import GradingRules
from rollout.field_error import FieldError
from rollout.renoising.request import RenoisingParams
from rollout.request import SCHEDULE_PARAMETER, SamplingParams

Params = SamplingParams | RenoisingParams

_SHARE, _COUNT = re.compile(r"\d{0,9}\.?\d{1,9}"), re.compile(r"\d{1,9}")
_HALF = "0.5"
_NO_RENOISING_SCHEDULE = (
    f"is no schedule of {MODEL_TYPE} policies; write steps=48, of a canvas at most, or entropy_bound=0.1"
)
_OPTION_OF = {"gen_length": "--lengths", "block_length": "--block-length"}
_NAMES = sampler_names({"block_length": "--block-length", "temperature": "--temperature"})


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationOptions:
    """Evaluation options of the command line; None if not given."""

    tasks: tuple[str, ...] | None = None
    lengths: tuple[int, ...] | None = None
    schedules: tuple[str, ...] | None = None
    block_length: int | None = None
    num_problems: int | None = None
    protocol: GradingRules = "fixed"
    fields: tuple[str, ...] = ()
    """Overrides of task fields: `TASK.KEY=VALUE`."""
    num_samples: int = 1
    """Completions per problem."""
    temperature: float = 0.0
    """Sampling temperature; 0 selects the most probable token."""
    seed: int = 0
    """Seed of the sampling."""


def temperature_of(params: Params) -> float | None:
    """Return the sampling temperature; None if it decreases from step to step."""
    return params.temperature if isinstance(params, SamplingParams) else None


def params_of(facts: Mapping[str, Any]) -> Params:
    """Parse the sampling parameters in a cell's facts. Raises ValidationError if they are invalid."""
    given = facts["params"]
    return (RenoisingParams if "max_denoise_steps" in given else SamplingParams).model_validate(given)


def params_for(
    options: EvaluationOptions, run: Recipe | None, policy: TransformerConfig | RenoisingConfig
) -> Sequence[Params]:
    """Return the sampling parameters for each length and schedule. Raises UserError as `cells.cells_of`."""
    if isinstance(policy, RenoisingConfig):
        return _renoising_params(options, policy)
    if options.num_samples > 1 and not options.temperature:
        raise UserError(
            f"--samples {options.num_samples} of the likeliest tokens are all alike; say --temperature, as in 0.8"
        )
    return _d1_params(options) if options.protocol == "d1" else _params(options, run, policy)


def _d1_params(options: EvaluationOptions) -> list[SamplingParams]:
    if options.schedules is not None or options.block_length is not None:
        raise UserError(
            "--protocol d1 denoises as the first d1 does: blocks of 32, half as many steps as slots; "
            "leave out --schedules and --block-length"
        )
    if options.temperature:
        raise UserError("--protocol d1 takes the likeliest token; leave out --samples and --temperature")
    block = first_d1.BLOCK_LENGTH
    if strays := [length for length in options.lengths or () if length % block]:
        raise UserError(f"--protocol d1 denoises in blocks of {block}; --lengths {strays[0]} is no multiple of {block}")
    # The first d1 fills the whole canvas: there are no stop ids.
    fixed = {"block_length": block, "temperature": 0.0, "stop_ids": ()}
    return [
        _checked({"gen_length": length, "steps": length // 2, **fixed}, f"--lengths {length}: ")
        for length in options.lengths or first_d1.LENGTHS
    ]


def _params(options: EvaluationOptions, run: Recipe | None, policy: TransformerConfig) -> list[SamplingParams]:
    """Return the parameters for each length and schedule, by default those of the run's evaluation."""
    drawn = {"temperature": options.temperature}
    if run is not None and (options.lengths or options.schedules or options.block_length) is None:
        return [_checked({**values_of(params), **drawn}) for params in run.evaluated_params]
    if run is None:
        defaults = Defaults.of_policy(policy.max_sequence_length, policy.block_length)
    else:
        defaults = Defaults.of_run(run.evaluated_params[0])
    block = {} if options.block_length is None else {"block_length": options.block_length}
    is_one_block = not block and run is not None and run.evaluated_params[0].num_blocks == 1
    found = []
    for length in options.lengths or (defaults.complete([block], 0)["gen_length"],):
        shape = {"gen_length": length, **({"block_length": length} if is_one_block else block)}
        block_length = defaults.complete([shape], 0)["block_length"]
        for text in options.schedules or (_HALF,):
            values = defaults.complete([shape, _schedule(text, length, block_length), drawn], 0)
            found.append(_checked(values, f"--lengths {length} --schedules {text}: "))
    return found


def _renoising_params(options: EvaluationOptions, policy: RenoisingConfig) -> list[RenoisingParams]:
    """Return the parameters for each length and schedule, by default the checkpoint's own."""
    if options.protocol == "d1":
        raise UserError(f"--protocol d1 fills masked slots, and {MODEL_TYPE} policies have none; leave it out")
    if options.temperature:
        raise UserError(
            f"--temperature {options.temperature:g} is not for {MODEL_TYPE} policies, whose draws have one of "
            "their own for each step; leave it out"
        )
    block = {} if options.block_length is None else {"block_length": options.block_length}
    lengths: list[Values] = [{"gen_length": length} for length in options.lengths or ()] or [{}]
    schedules = [
        _parameter(text, ("steps", "entropy_bound"), _NO_RENOISING_SCHEDULE) for text in options.schedules or ()
    ] or [{}]
    defaults = RenoisingDefaults(config=policy)
    try:
        layers = [[block, length, schedule] for length in lengths for schedule in schedules]
        return [to_renoising_params(defaults.complete(some, 0)) for some in layers]
    except FieldError as error:
        raise UserError(error.named(_OPTION_OF)) from error
    except ValidationError as error:
        raise UserError(f"--schedules: {request_error_of(error, RenoisingParams, sampler_names({}))}") from error


def _schedule(text: str, gen_length: int, block_length: int) -> Values:
    """Parse `0.5` (half as many steps as slots), or a parameter such as `steps=9` or `threshold=0.9`."""
    if _SHARE.fullmatch(text) and 0 < float(text) <= 1:
        num_blocks = max(1, gen_length // max(1, block_length))
        return {"schedule": "quota", "steps": num_blocks * max(1, round(float(text) * block_length))}
    names = SCHEDULE_PARAMETER.values()
    others = ", ".join(f"{name}=0.9" for name in names)
    found = _parameter(
        text, ("steps", *names), f"is no schedule; write a share of the slots as in 0.5, or steps=9, {others}"
    )
    return {"schedule": "quota", **found} if "steps" in found else found


def _parameter(text: str, names: Collection[str], refusal: str) -> Values:
    """Parse a number of steps or another parameter of a schedule."""
    name, _, value = text.partition("=")
    parse, form = (int, _COUNT) if name == "steps" else (float, _SHARE)
    if name not in names or not form.fullmatch(value):
        raise UserError(f"--schedules {text} {refusal}")
    return {name: parse(value)}


def _checked(values: Values, place: str = "") -> SamplingParams:
    try:
        return to_params(values)
    except ValidationError as error:
        raise UserError(f"{place}{request_error_of(error, SamplingParams, _NAMES)}") from error
