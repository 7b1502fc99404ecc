"""Sampling parameters by the keys of requests: the fields of the samplers' own, of which one has a shorter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.renoising.request import RenoisingParams
from rollout.request import SamplingParams

Values = Mapping[str, Any]

_STEPS, _CANVAS_STEPS = "num_denoise_steps", "max_denoise_steps"
SAMPLING_KEYS = tuple("steps" if name == _STEPS else name for name in SamplingParams.model_fields)
"""In the order of `SamplingParams`."""
RENOISING_KEYS = tuple("steps" if name == _CANVAS_STEPS else name for name in RenoisingParams.model_fields)
"""In the order of `RenoisingParams`."""
ALL_KEYS = (*SAMPLING_KEYS, *(key for key in RENOISING_KEYS if key not in SAMPLING_KEYS))
"""Those of every family."""


def to_params(values: Values) -> SamplingParams:
    """The parameters of some values. Raises ValidationError."""
    return SamplingParams.model_validate({_STEPS if key == "steps" else key: value for key, value in values.items()})


def to_renoising_params(values: Values) -> RenoisingParams:
    """The same of a policy without a mask token. Raises ValidationError."""
    named = {_CANVAS_STEPS if key == "steps" else key: value for key, value in values.items()}
    return RenoisingParams.model_validate(named)


def values_of(params: SamplingParams) -> dict[str, Any]:
    """The values of parameters."""
    values = params.model_dump(mode="json", exclude_none=True)
    return {"steps" if name == _STEPS else name: value for name, value in values.items()}


def sampler_names(names: Mapping[str, str]) -> dict[str, str]:
    """What fields are called, by the sampler's names for them."""
    return {**names, **dict.fromkeys((_STEPS, _CANVAS_STEPS), names.get("steps", "steps"))}
