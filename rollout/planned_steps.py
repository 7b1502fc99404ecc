"""Denoise steps of a completion that fills its canvas, planned without a policy: how many slots each computes."""

from __future__ import annotations

from typing import NamedTuple

from learner.model.config import TransformerConfig
from rollout.canvas import Canvas
from rollout.request import Cache, SamplingParams


class PlannedSteps(NamedTuple):
    """Denoise steps that compute the same number of slots."""

    num_steps: float
    """Their number, at most."""
    num_computed: int
    """Slots that a step computes."""
    num_seen: int
    """Slots that each of them attends to."""
    is_cached: bool
    """Whether the other slots are read from the KV cache."""


def planned_steps(
    params: SamplingParams, shape: TransformerConfig, prompt_tokens: int, num_steps: int, *, block_cache: bool
) -> list[PlannedSteps]:
    """Return the denoise steps of a completion.

    A schedule that depends on probabilities is counted at its worst: one committed slot per step.

    Args:
        params: the sampling parameters.
        shape: the policy's shape.
        prompt_tokens: length of the prompt.
        num_steps: maximum number of denoise steps, unless the policy caches finished blocks.
        block_cache: whether a block-causal policy keeps the keys and values of finished blocks.
    """
    if shape.is_block_causal and block_cache and not params.cfg_scale:
        return _block_causal_steps(params, shape, prompt_tokens)
    length, block, blocks = prompt_tokens + params.gen_length, params.block_length, params.num_blocks
    if params.cache is Cache.NONE:
        return [PlannedSteps(num_steps, length, length, is_cached=False)]
    per_block = num_steps / blocks
    num_whole = -(-per_block // params.cache_refresh_steps) if params.cache_refresh_steps else 1
    runs = [block if params.cache is Cache.DUAL else params.gen_length - index * block for index in range(blocks)]
    cached = [PlannedSteps(per_block - num_whole, run, length, is_cached=True) for run in runs]
    return [PlannedSteps(blocks * num_whole, length, length, is_cached=False), *cached]


def _block_causal_steps(params: SamplingParams, shape: TransformerConfig, prompt_tokens: int) -> list[PlannedSteps]:
    """Return the steps with a KV cache of finished blocks: the first step of a block recomputes the previous block."""
    block, found = params.block_length, []
    canvas = Canvas(prompt_length=prompt_tokens, gen_length=params.gen_length, block_length=block, is_block_causal=True)
    begin, num_cached = canvas.block_end(prompt_tokens) - block, 0
    while begin < canvas.end:
        seen = begin + block
        num_steps = _steps_for(params, seen - max(begin, prompt_tokens))
        # A policy that predicts the next slot also runs the one before the block.
        num_later = block + shape.predicts_next * (begin > 0)
        found.append(PlannedSteps(1, seen - num_cached, seen, is_cached=True))
        found.append(PlannedSteps(num_steps - 1, num_later, seen, is_cached=True))
        num_cached, begin = begin, seen
    return found


def _steps_for(params: SamplingParams, num_slots: int) -> int:
    """Return the denoise steps of a block with `num_slots` masked slots; each step commits the share of a full block.

    Steps that token editing adds depend on the policy, and are not counted.
    """
    if not (params.has_even_shares or params.steps_per_block):
        return num_slots
    share, num_larger = divmod(params.block_length, params.num_block_steps)
    steps = range(1, params.num_block_steps + 1)
    return next(count for count in steps if count * share + min(count, num_larger) >= num_slots)
