"""FLOP counts of a round's update, for the first d1's method and ours, and the possible speed-up.

Counts use `learner/flops.py`. A backward pass is twice its forward. A ratio of counts is the speed-up between two
programs that run every matmul at the same rate. Norms, softmaxes and the optimizer step are not counted.

Shape letters: B completions, S slots of a canvas, L completion slots, N tokens of text, U inner updates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from learner.flops import CanvasSums, forward_flops
from learner.model.config import TransformerConfig
from learner.model.lora_config import FULL_FINE_TUNING

COLUMNS = {"network": "network", "way": "way", "tflop": "TFLOP a round", "ratio": "of the first"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Size of a round."""

    num_canvases: int
    """B, or fewer if completions share canvases."""
    canvas_tokens: int
    """Slots of a canvas, S."""
    asked_tokens: int
    """Completion slots of a canvas, L."""
    text_tokens: int
    """N: slots whose token is scored, over all canvases."""
    num_updates: int
    """Inner updates, U."""


def forward(config: TransformerConfig, counts: Counts, *, spares_head: bool, spares_block: bool) -> tuple[float, float]:
    """Count the FLOP of one forward of all canvases. Returns those of the body, attention included, and of the head.

    Args:
        config: the network.
        counts: the round.
        spares_head: whether the head runs on the text only.
        spares_block: whether the last block runs only the queries of the completion, and the feed-forward of the text.
    """
    slots = counts.num_canvases * counts.canvas_tokens
    asked = counts.num_canvases * counts.asked_tokens if spares_block else slots
    canvases = CanvasSums(
        tokens=slots,
        pairs=slots * counts.canvas_tokens,
        queries=asked,
        query_pairs=asked * counts.canvas_tokens,
        scored=counts.text_tokens if spares_block else slots,
    )
    of_head = replace(canvases, scored=counts.text_tokens if spares_head else slots)
    return forward_flops(config, FULL_FINE_TUNING, canvases).body, forward_flops(config, FULL_FINE_TUNING, of_head).head


def round_flops(config: TransformerConfig, counts: Counts) -> dict[str, float]:
    """Count the FLOP of a round whose prompt masks change with each update, adding savings one by one."""
    U = counts.num_updates
    all_body, all_head = forward(config, counts, spares_head=False, spares_block=False)
    _, text_head = forward(config, counts, spares_head=True, spares_block=False)
    body, head = forward(config, counts, spares_head=True, spares_block=True)
    return {
        # Old, reference and new forward count once each, the backward twice.
        "the first d1: five forwards' worth an update, all slots": 5 * U * (all_body + all_head),
        "head on the text": 5 * U * (all_body + text_head),
        "last block on the completion": 5 * U * (body + head),
        "first old forward for free: least for these canvases": (5 * U - 1) * (body + head),
        "head computed again in the backward, above 2^24 logits": (5 * U - 1) * (body + head) + U * head,
    }


def shared_flops(config: TransformerConfig, counts: Counts) -> float:
    """Count our FLOP without prompt masks: one reference forward per round, no old forward.

    `counts` covers the distinct canvases: one per group, with the text of its longest completion.
    """
    body, head = forward(config, counts, spares_head=True, spares_block=True)
    return (3 * counts.num_updates + 1) * (body + head)


def rows(network: str, config: TransformerConfig, counts: Counts, shared: Counts) -> list[dict[str, Any]]:
    """Tabulate one network. `shared` counts the distinct canvases if prompts are not masked."""
    flops = round_flops(config, counts) | {"no prompt masks: ours": shared_flops(config, shared)}
    first = next(iter(flops.values()))
    return [
        {"network": network, "way": way, "tflop": value / 1e12, "ratio": first / value} for way, value in flops.items()
    ]
