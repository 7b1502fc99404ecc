"""End of a text: at a stop token, before a stop string, or at the token limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deploy.requests.planner import RequestPlan

BROKEN = "\ufffd"
"""Replacement character that a decoder writes for an incomplete UTF-8 sequence."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoppedText:
    """Text of some tokens up to its end, with the finish reason."""

    text: str
    num_tokens: int
    """Tokens of the text, including an end-of-text token."""
    reason: Literal["eos", "stop", "length"] | None
    """Finish reason; None while the text continues."""


def stop_text(
    plan: RequestPlan, ids: NDArray[Any], decode: Decode, policy_stop_ids: Sequence[int], *, is_complete: bool
) -> StoppedText:
    """Return the text of the tokens so far, cut at its end.

    Args:
        plan: the planned request.
        ids: tokens of the finished blocks, from the first block on.
        decode: decodes tokens to text, without special tokens.
        policy_stop_ids: stop ids of the policy, used if the plan has none.
        is_complete: whether the tokens are complete: no more will follow.
    """
    stop_ids = list(policy_stop_ids if plan.stop_ids is None else plan.stop_ids)
    is_infill = plan.num_gap_slots is not None
    places = [] if is_infill else np.isin(ids, stop_ids).nonzero()[0].tolist()
    first_end = places[0] + 1 if places else len(ids) + 1
    length = min(len(ids), plan.most_tokens, first_end)
    kept = ids[:length].tolist()
    is_ended = bool(kept) and kept[-1] in stop_ids
    # A stop id that is not a special token would be decoded as text.
    text = decode(kept[:-1] if is_ended and not plan.includes_stop else kept)
    if found := [(place, place + len(stop)) for stop in plan.body.stops if (place := text.find(stop)) >= 0]:
        end = min(found)[plan.includes_stop]
        return StoppedText(text=text[:end], num_tokens=_num_with(kept, end, decode), reason="stop")
    if not is_complete and length not in (plan.most_tokens, first_end):
        return StoppedText(text=text, num_tokens=length, reason=None)
    if is_infill:
        return StoppedText(text=text, num_tokens=length, reason="stop")
    # A text constrained by a grammar is complete at its end.
    at_the_end: Literal["stop", "length"] = "length" if plan.grammar is None else "stop"
    return StoppedText(text=text, num_tokens=length, reason="eos" if is_ended else at_the_end)


def _num_with(ids: list[int], num_characters: int, decode: Decode) -> int:
    """Return the smallest number of tokens whose text has `num_characters` characters."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(decode(ids[:middle]).rstrip(BROKEN)) >= num_characters:
            high = middle
        else:
            low = middle + 1
    return low
