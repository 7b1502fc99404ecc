"""RoPE scaling (linear, YaRN, Llama 3) for contexts longer than those of pre-training.

The fields have the names of transformers' `rope_parameters`.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator


class _Scaling(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    factor: PositiveFloat
    """Ratio of the extended context length to that of pre-training."""


class LinearScaling(_Scaling):
    """Linear scaling: positions are divided by the factor."""

    rope_type: Literal["linear"] = "linear"


class YarnScaling(_Scaling):
    """YaRN (arXiv 2309.00071): low frequencies are divided by the factor, high ones stay, others are interpolated."""

    rope_type: Literal["yarn"] = "yarn"
    original_max_position_embeddings: PositiveInt
    """Context length of pre-training."""
    attention_factor: PositiveFloat | None = None
    """Multiplier of cosines and sines; None: the value that `factor` implies (the paper's equation 22)."""
    mscale: NonNegativeFloat | None = None
    """With `mscale_all_dim`, DeepSeek's form of the implied multiplier: the weight in its numerator."""
    mscale_all_dim: NonNegativeFloat | None = None
    """The weight in its denominator."""
    beta_fast: PositiveFloat = 32.0
    """Frequencies with at least this many turns within the pre-training context are unscaled."""
    beta_slow: PositiveFloat = 1.0
    """Frequencies with at most this many turns are divided by the factor."""
    truncate: bool = True
    """Whether the ends of the interpolated range are rounded to whole pairs."""

    @property
    def magnitude(self) -> float:
        """Multiplier of cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        stretch = 0.1 * math.log(max(self.factor, 1.0))
        if self.mscale and self.mscale_all_dim:
            return (self.mscale * stretch + 1) / (self.mscale_all_dim * stretch + 1)
        return stretch + 1


class Llama3Scaling(_Scaling):
    """Llama 3.1's scaling: frequencies of long wavelengths are divided by the factor, those of short ones stay."""

    rope_type: Literal["llama3"] = "llama3"
    original_max_position_embeddings: PositiveInt
    """Context length of pre-training."""
    low_freq_factor: PositiveFloat
    """Wavelengths longer than the pre-training context divided by this are scaled."""
    high_freq_factor: PositiveFloat
    """Wavelengths shorter than the pre-training context divided by this are unscaled; those between, interpolated."""

    @model_validator(mode="after")
    def _in_order(self) -> Llama3Scaling:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"high_freq_factor {self.high_freq_factor} must be above low_freq_factor")
        return self


RotaryScaling = Annotated[LinearScaling | YarnScaling | Llama3Scaling, Field(discriminator="rope_type")]
SCALINGS: dict[str, type[LinearScaling | YarnScaling | Llama3Scaling]] = {
    "linear": LinearScaling,
    "yarn": YarnScaling,
    "llama3": Llama3Scaling,
}
