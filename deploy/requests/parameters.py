"""Sampling parameters by the keys of requests: the fields of `SamplingParams`, of which one has a shorter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.request import SamplingParams

Values = Mapping[str, Any]

_STEPS = "num_denoise_steps"
SAMPLING_KEYS = tuple("steps" if name == _STEPS else name for name in SamplingParams.model_fields)
"""In the order of `SamplingParams`."""


def to_params(values: Values) -> SamplingParams:
    """The parameters of some values. Raises ValidationError."""
    return SamplingParams.model_validate({_STEPS if key == "steps" else key: value for key, value in values.items()})


def values_of(params: SamplingParams) -> dict[str, Any]:
    """The values of parameters."""
    values = params.model_dump(mode="json", exclude_none=True)
    return {"steps" if name == _STEPS else name: value for name, value in values.items()}


def sampler_names(names: Mapping[str, str]) -> dict[str, str]:
    """What fields are called, by the sampler's names for them."""
    return {**names, _STEPS: names.get("steps", "steps")}
