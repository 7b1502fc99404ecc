"""Which groups of a round are sampled together: portions of about the same number of tokens, each of like lengths.

Canvases that are denoised together are padded to the longest of them, so a portion costs its canvases times that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def portioned(lengths: Sequence[int], size: int, most: int) -> list[tuple[int, ...]]:
    """The groups of each portion, the costliest portion first. There are as many as with `size` groups in each.

    The costliest is as cheap as it can be with groups that are cut into portions by their length. Where all are of one
    length, they are in their order, `size` in a portion.

    Args:
        lengths: tokens of a canvas of each group.
        size: groups of a portion, if all were alike.
        most: groups of a portion, at most; no less than `size`.
    """
    if len(set(lengths)) == 1:
        return in_order(range(len(lengths)), size)
    count, most = -(-len(lengths) // size), min(most, len(lengths))
    order = sorted(range(len(lengths)), key=lambda group: (-lengths[group], group))
    limits = sorted({size * length for size in range(1, most + 1) for length in set(lengths)})
    fits = bisect_left(limits, True, key=lambda limit: len(_filled(order, lengths, limit, most)) <= count)
    portions = _filled(order, lengths, limits[fits], most)
    while len(portions) < count:
        # Every portion is somebody's: halves of the costliest.
        index = max(range(len(portions)), key=lambda place: (len(portions[place]) > 1, _cost(portions[place], lengths)))
        whole = portions[index]
        portions[index : index + 1] = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    portions.sort(key=lambda portion: -_cost(portion, lengths))
    return [tuple(sorted(portion)) for portion in portions]


def in_order(groups: range, size: int) -> list[tuple[int, ...]]:
    """The groups of each portion where they stay in their order, `size` in a portion."""
    return _in_batches(groups, size)


def evaluated_together(prompts: Sequence[int], size: int, usual: int, num_slots: int) -> list[tuple[int, ...]]:
    """The requests of each batch of an evaluation, by their place.

    They stay in their order, `size` in a batch. Those with longer prompts than usual come after the others, in batches
    that take no more tokens, of one request at least.

    Args:
        prompts: tokens of each prompt.
        size: requests of a batch.
        usual: tokens of the longest prompt that batches of that size are made for.
        num_slots: tokens of a completion.
    """
    short = [place for place, length in enumerate(prompts) if length <= usual]
    long = [place for place, length in enumerate(prompts) if length > usual]
    fewer = max(1, size * (usual + num_slots) // (max(prompts, default=0) + num_slots))
    return [*_in_batches(short, size), *_in_batches(long, fewer)]


def _in_batches(places: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(places[first : first + size]) for first in range(0, len(places), size)]


def _filled(order: Sequence[int], lengths: Sequence[int], limit: int, most: int) -> list[list[int]]:
    """Portions that cost no more than a limit, the longest groups first; one group at least is in each."""
    portions: list[list[int]] = []
    for group in order:
        # The first is the longest.
        if portions and len(portions[-1]) < min(most, limit // lengths[portions[-1][0]]):
            portions[-1].append(group)
        else:
            portions.append([group])
    return portions


def _cost(portion: Sequence[int], lengths: Sequence[int]) -> int:
    return len(portion) * max(lengths[group] for group in portion)
