"""Rotary positions: how far each pair of numbers of a head turns at each column, and the turning.

Shape letters: L columns, E what is rotated of a head's width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.model.config import TransformerConfig


def rope_tables(length: int, config: TransformerConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [L, E] of the rotary embedding, in float32 as LLaDA's `rope_full_precision`.

    E is what is rotated of a head's width, and the frequencies are over that. The sines of the first half are negated:
    `rotate` then needs no sign of its own.
    """
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, rope_frequencies(config, device))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rope_frequencies(config: TransformerConfig, device: torch.device) -> Tensor:
    """Angles [E / 2] that the rotary embedding turns each pair by from one position to the next."""
    exponents = torch.arange(0, config.rotary_dim, 2, device=device, dtype=torch.float32) / config.rotary_dim
    return 1.0 / config.rope_theta**exponents


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (i, i + E/2) of the last axis of x [..., L, E] by their position, in float32. What is beyond the
    tables' width passes through."""
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
    """What `rotate` computes, without a gradient: in bfloat16 three kernels for five, and 14 bytes for 40.

    A kernel that is given two precisions computes in the wider one, and rounds only what it writes: the one tensor in
    float32 is that of the cosines' products. A CPU would convert its tensors first, and is slower so.
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
    """Whether the forward under way is one for inference that nobody compiles: a compiler fuses by itself, and cannot
    look into this."""
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
