"""Scaled rotary positions, which let a policy read longer texts than it was pre-trained on.

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
    """How many times longer texts become."""


class LinearScaling(_Scaling):
    """Positions divided by the factor."""

    rope_type: Literal["linear"] = "linear"


class YarnScaling(_Scaling):
    """YaRN (arXiv 2309.00071): slow frequencies are divided by the factor, fast ones stay, others are in between."""

    rope_type: Literal["yarn"] = "yarn"
    original_max_position_embeddings: PositiveInt
    """Longest text of the pre-training."""
    attention_factor: PositiveFloat | None = None
    """What cosines and sines are multiplied by; None: what the factor implies (the paper's equation 22)."""
    mscale: NonNegativeFloat | None = None
    """With `mscale_all_dim`, the numerator of what is implied: DeepSeek's form."""
    mscale_all_dim: NonNegativeFloat | None = None
    """Its denominator."""
    beta_fast: PositiveFloat = 32.0
    """Turns within the longest text from which a frequency stays as it is."""
    beta_slow: PositiveFloat = 1.0
    """Turns up to which a frequency is divided."""
    truncate: bool = True
    """Whether the first and the last pair in between are whole numbers."""

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        stretch = 0.1 * math.log(max(self.factor, 1.0))
        if self.mscale and self.mscale_all_dim:
            return (self.mscale * stretch + 1) / (self.mscale_all_dim * stretch + 1)
        return stretch + 1


class Llama3Scaling(_Scaling):
    """Llama 3.1's: long waves are divided by the factor, short ones stay, others are in between."""

    rope_type: Literal["llama3"] = "llama3"
    original_max_position_embeddings: PositiveInt
    """Longest text of the pre-training."""
    low_freq_factor: PositiveFloat
    """Waves of more than the longest text over this are divided."""
    high_freq_factor: PositiveFloat
    """Waves of less than the longest text over this stay."""

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
