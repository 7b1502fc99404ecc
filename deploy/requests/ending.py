"""Where a text ends: at an end of text, before a stop string, or after as many tokens as were asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deploy.requests.planner import RequestPlan

BROKEN = "\ufffd"
"""What a decoder writes for bytes that are no whole character."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """The text of some tokens, up to its end."""

    text: str
    num_tokens: int
    """Tokens of the text, an end of text included."""
    reason: Literal["eos", "stop", "length"] | None
    """Why it ended; None while it goes on."""


def ending_of(plan: RequestPlan, ids: NDArray[Any], decode: Decode, ends: Sequence[int], *, is_whole: bool) -> Ending:
    """The text of the tokens so far, up to its end.

    Args:
        plan: what was asked.
        ids: tokens of finished blocks, from the first on.
        decode: the text of tokens, special ones left out.
        ends: the ids that end a text where the plan names none; the policy's.
        is_whole: whether no more tokens come.
    """
    stop_ids = list(ends if plan.stop_ids is None else plan.stop_ids)
    is_infill = plan.num_gap_slots is not None
    places = [] if is_infill else np.isin(ids, stop_ids).nonzero()[0].tolist()
    first_end = places[0] + 1 if places else len(ids) + 1
    length = min(len(ids), plan.most_tokens, first_end)
    kept = ids[:length].tolist()
    is_ended = bool(kept) and kept[-1] in stop_ids
    # An end that is no special token is no part of the text.
    text = decode(kept[:-1] if is_ended and not plan.includes_stop else kept)
    if found := [(place, place + len(stop)) for stop in plan.stops if (place := text.find(stop)) >= 0]:
        end = min(found)[plan.includes_stop]
        return Ending(text=text[:end], num_tokens=_num_with(kept, end, decode), reason="stop")
    if not is_whole and length not in (plan.most_tokens, first_end):
        return Ending(text=text, num_tokens=length, reason=None)
    if is_infill:
        return Ending(text=text, num_tokens=length, reason="stop")
    # A text of a grammar is complete where it ends.
    at_the_end: Literal["stop", "length"] = "length" if plan.grammar is None else "stop"
    return Ending(text=text, num_tokens=length, reason="eos" if is_ended else at_the_end)


def _num_with(ids: list[int], num_characters: int, decode: Decode) -> int:
    """The fewest tokens whose text has so many characters."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(decode(ids[:middle]).rstrip(BROKEN)) >= num_characters:
            high = middle
        else:
            low = middle + 1
    return low
