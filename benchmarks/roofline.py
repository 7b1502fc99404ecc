"""Roofline of the sampler: tokens per second that LLaDA-8B's FLOP allow on one H200."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.setting import full, random_policy
from benchmarks.measure import seconds
from benchmarks.models import LLADA_8B
from rollout.sampler import Sampler

COLUMNS = {"method": "method", "network": "network", "limit": "limit", "measured": "measured", "share": "share"}
_LAYERS, _WIDTH, _VOCAB = LLADA_8B.num_layers, LLADA_8B.d_model, LLADA_8B.vocab_size
_HIDDEN = 3 * _WIDTH
# Achievable rate of a dense bfloat16 matmul on an H200.
_FLOP_PER_S = 790e12
# The reference's schedule: 2 tokens per forward.
_PROMPT, _GEN, _BLOCK, _STEPS = 256, 256, 32, 128


def limit(*, num_layers: int = _LAYERS, masked_head: bool, restricted: bool) -> float:
    """Compute tokens per second if every FLOP of the reference's schedule ran at full rate, at any batch size.

    Args:
        num_layers: blocks.
        masked_head: whether the head runs on the masked slots of the block only.
        restricted: whether the last block predicts the block's slots only.
    """
    canvas = _PROMPT + _GEN
    key_value, query_out, feed_forward = 2 * _WIDTH**2, 2 * _WIDTH**2, 3 * _WIDTH * _HIDDEN
    weights = num_layers * (key_value + query_out + feed_forward) * canvas
    attention = num_layers * 2 * canvas * canvas * _WIDTH
    if restricted:
        idle = canvas - _BLOCK
        weights -= (query_out + feed_forward) * idle
        attention -= 2 * canvas * idle * _WIDTH
    scored = _BLOCK / 2 if masked_head else canvas
    flop = 2 * (weights + attention + _WIDTH * _VOCAB * scored)
    return _FLOP_PER_S / flop * _GEN / _STEPS


def rows(device: str) -> list[dict[str, Any]]:
    """Tabulate the limits of LLaDA-8B, and on a GPU the measured rate of a network of its shape."""
    limits = {
        "the reference: head everywhere": limit(masked_head=False, restricted=False),
        "head on the masked slots": limit(masked_head=True, restricted=False),
        "and the last block on the block (d1, exact)": limit(masked_head=True, restricted=True),
    }
    shown: list[dict[str, Any]] = [
        {"method": method, "network": "LLaDA-8B", "limit": value} for method, value in limits.items()
    ]
    return shown + ([_measured(batch) for batch in (1, 8, 16)] if device == "cuda" else [])


def _measured(batch: int) -> dict[str, Any]:
    """Measure d1's exact sampler on a random bfloat16 network of LLaDA-8B's shape."""
    setting = full("cuda")
    model = random_policy(setting, torch.bfloat16)
    requests = setting.requests(batch, temperature=0.9)
    sampler = Sampler(model, 0)
    sampler.generate([requests[0]])
    rate = batch * setting.gen_length / seconds(lambda: sampler.generate(requests), "cuda")
    whole = limit(masked_head=True, restricted=True)
    return {
        "method": f"d1, exact, batch {batch}",
        "network": "its shape",
        "limit": whole,
        "measured": rate,
        "share": rate / whole,
    }
