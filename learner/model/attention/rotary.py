"""Rotary position embeddings (RoPE): tables of cosines and sines, and the rotation.

Shape letters: L columns, E rotated part of a head's width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from learner.model.attention.scaling import LinearScaling, Llama3Scaling, YarnScaling
from learner.model.config import TransformerConfig


def rope_tables(length: int, config: TransformerConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines [L, E] of the rotary embedding, in float32 as LLaDA's `rope_full_precision`.

    The frequencies are computed over E, not over the whole head. The sines of the first half are negated, so that
    `rotate` applies no sign.
    """
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, rope_frequencies(config, device))
    cos, sin = angles.cos(), angles.sin()
    if isinstance(config.rope_scaling, YarnScaling):
        cos, sin = cos * config.rope_scaling.magnitude, sin * config.rope_scaling.magnitude
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rope_frequencies(config: TransformerConfig, device: torch.device) -> Tensor:
    """Compute the angle [E / 2] by which each pair turns from one position to the next."""
    exponents = torch.arange(0, config.rotary_dim, 2, device=device, dtype=torch.float32) / config.rotary_dim
    plain = 1.0 / config.rope_theta**exponents
    match config.rope_scaling:
        case None:
            return plain
        case LinearScaling(factor=factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return _llama3_frequencies(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn_frequencies(plain, scaling, config)


def _yarn_frequencies(plain: Tensor, scaling: YarnScaling, config: TransformerConfig) -> Tensor:
    """Apply YaRN: keep frequencies above `beta_fast` turns, divide those below `beta_slow`, interpolate in between."""
    width, longest = config.rotary_dim, scaling.original_max_position_embeddings

    def pair_of(turns: float) -> float:
        return width * math.log(longest / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    pairs = torch.arange(len(plain), device=plain.device, dtype=torch.float32)
    # 0.001 avoids a division by zero where both are the same pair, as in transformers.
    share = ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
    return plain / scaling.factor * share + plain * (1 - share)


def _llama3_frequencies(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Apply Llama 3.1's scaling: keep short wavelengths, divide the frequencies of long ones, interpolate between."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    waves = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    share = ((waves - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * (1 - share) + plain * share


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (i, i + E/2) of the last axis of x [..., L, E] by their position, in float32.

    Columns beyond the tables' width are returned unrotated.
    """
    width = rope[0].shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], rope), x[..., width:]), dim=-1)
    if x.device.type != "cpu" and is_inference():
        return rotate_by_halves(x, rope)
    cos, signed_sin = rope
    wide = x.float()
    low, high = wide.chunk(2, dim=-1)
    return (wide * cos).addcmul_(torch.cat((high, low), dim=-1), signed_sin).to(x.dtype)


def rotate_by_halves(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Compute `rotate` without a gradient: in bfloat16, 3 kernels instead of 5, and 14 bytes moved a number, not 40.

    A CUDA kernel with inputs of two precisions computes in the wider one and rounds only its output. So the products
    with the cosines are the only float32 tensor. A CPU converts the inputs first, which is slower.
    """
    cos, signed_sin = rope
    own, rotated = x * cos, torch.empty_like(x)
    low, high = x.chunk(2, dim=-1)
    for out, part, other, sin in zip(
        rotated.chunk(2, dim=-1), own.chunk(2, dim=-1), (high, low), signed_sin.chunk(2, dim=-1), strict=True
    ):
        torch.addcmul(part, other, sin, out=out)
    return rotated


def is_inference() -> bool:
    """Whether this forward runs in inference mode and is not being compiled.

    A compiler fuses operations itself, and cannot trace the query of inference mode.
    """
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
