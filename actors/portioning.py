"""Length-balanced batching: splits a round's groups into work units of similar cost and length.

Canvases that are denoised together are padded to the longest, so a work unit costs its number of canvases times that
length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def portioned(lengths: Sequence[int], size: int, most: int) -> list[tuple[int, ...]]:
    """Split groups into work units, costliest first; there are as many as with `size` groups in each.

    Groups are sorted by length and split so that the costliest work unit is as cheap as possible. If all lengths are
    equal, the groups stay in order, `size` in each.

    Args:
        lengths: canvas tokens of each group.
        size: groups per work unit if all lengths were equal.
        most: maximum groups per work unit; at least `size`.
    """
    if len(set(lengths)) == 1:
        return in_order(range(len(lengths)), size)
    count, most = -(-len(lengths) // size), min(most, len(lengths))
    order = sorted(range(len(lengths)), key=lambda group: (-lengths[group], group))
    limits = sorted({size * length for size in range(1, most + 1) for length in set(lengths)})
    fits = bisect_left(limits, True, key=lambda limit: len(_filled(order, lengths, limit, most)) <= count)
    portions = _filled(order, lengths, limits[fits], most)
    while len(portions) < count:
        # The number of work units is fixed, so that each sampler has its share: halve the costliest.
        index = max(range(len(portions)), key=lambda place: (len(portions[place]) > 1, _cost(portions[place], lengths)))
        whole = portions[index]
        portions[index : index + 1] = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    portions.sort(key=lambda portion: -_cost(portion, lengths))
    return [tuple(sorted(portion)) for portion in portions]


def in_order(groups: range, size: int) -> list[tuple[int, ...]]:
    """Split groups into work units of `size` groups, in order."""
    return _in_batches(groups, size)


def evaluated_together(prompts: Sequence[int], size: int, usual: int, num_slots: int) -> list[tuple[int, ...]]:
    """Split the requests of an evaluation into batches of positions.

    Requests stay in order, `size` in a batch. Those with longer prompts than `usual` come last, in smaller batches with
    no more tokens, but at least one request.

    Args:
        prompts: tokens of each prompt.
        size: requests in a batch.
        usual: longest prompt, in tokens, for which batches of that size are made.
        num_slots: tokens of a completion.
    """
    short = [place for place, length in enumerate(prompts) if length <= usual]
    long = [place for place, length in enumerate(prompts) if length > usual]
    fewer = max(1, size * (usual + num_slots) // (max(prompts, default=0) + num_slots))
    return [*_in_batches(short, size), *_in_batches(long, fewer)]


def _in_batches(places: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(places[first : first + size]) for first in range(0, len(places), size)]


def _filled(order: Sequence[int], lengths: Sequence[int], limit: int, most: int) -> list[list[int]]:
    """Fill work units up to a cost limit, longest groups first; each has at least one group."""
    portions: list[list[int]] = []
    for group in order:
        # The first group is the longest, and so sets the padded length.
        if portions and len(portions[-1]) < min(most, limit // lengths[portions[-1][0]]):
            portions[-1].append(group)
        else:
            portions.append([group])
    return portions


def _cost(portion: Sequence[int], lengths: Sequence[int]) -> int:
    return len(portion) * max(lengths[group] for group in portion)
