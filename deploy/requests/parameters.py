"""Sampling parameters by request keys: the samplers' field names, except the shorter `steps`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.renoising.request import RenoisingParams
from rollout.request import SamplingParams

Values = Mapping[str, Any]

_STEPS, _CANVAS_STEPS = "num_denoise_steps", "max_denoise_steps"
SAMPLING_KEYS = tuple("steps" if name == _STEPS else name for name in SamplingParams.model_fields)
"""Keys of policies with a mask token, in the order of `SamplingParams`."""
RENOISING_KEYS = tuple("steps" if name == _CANVAS_STEPS else name for name in RenoisingParams.model_fields)
"""Keys of policies without one, in the order of `RenoisingParams`."""
ALL_KEYS = (*SAMPLING_KEYS, *(key for key in RENOISING_KEYS if key not in SAMPLING_KEYS))
"""Keys of both policy families."""


def to_params(values: Values) -> SamplingParams:
    """Convert values to `SamplingParams`. Raises ValidationError if they are invalid."""
    return SamplingParams.model_validate({_STEPS if key == "steps" else key: value for key, value in values.items()})


def to_renoising_params(values: Values) -> RenoisingParams:
    """Convert values to `RenoisingParams`. Raises ValidationError if they are invalid."""
    named = {_CANVAS_STEPS if key == "steps" else key: value for key, value in values.items()}
    return RenoisingParams.model_validate(named)


def values_of(params: SamplingParams) -> dict[str, Any]:
    """Return the values of `params` by request key, without unset ones."""
    values = params.model_dump(mode="json", exclude_none=True)
    return {"steps" if name == _STEPS else name: value for name, value in values.items()}


def sampler_names(names: Mapping[str, str]) -> dict[str, str]:
    """Extend a map of display names to the samplers' own names of the step count."""
    return {**names, **dict.fromkeys((_STEPS, _CANVAS_STEPS), names.get("steps", "steps"))}
