"""Length-balanced batching: splits a round's groups into work units of similar cost and length.

Canvases that are denoised together are padded to the longest, so a work unit costs its number of canvases times that
length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def balanced_batches(lengths: Sequence[int], size: int, most: int) -> list[tuple[int, ...]]:
    """Split groups into work units, costliest first; there are as many as with `size` groups in each.

    Groups are sorted by length and split so that the costliest work unit is as cheap as possible. If all lengths are
    equal, the groups stay in order, `size` in each.

    Args:
        lengths: canvas tokens of each group.
        size: groups per work unit if all lengths were equal.
        most: maximum groups per work unit; at least `size`.
    """
    if len(set(lengths)) == 1:
        return consecutive_batches(range(len(lengths)), size)
    count, most = -(-len(lengths) // size), min(most, len(lengths))
    order = sorted(range(len(lengths)), key=lambda group: (-lengths[group], group))
    limits = sorted({size * length for size in range(1, most + 1) for length in set(lengths)})
    fits = bisect_left(limits, True, key=lambda limit: len(_filled(order, lengths, limit, most)) <= count)
    work_units = _filled(order, lengths, limits[fits], most)
    while len(work_units) < count:
        # The number of work units is fixed, so that each sampler has its share: halve the costliest.
        index = max(
            range(len(work_units)), key=lambda place: (len(work_units[place]) > 1, _cost(work_units[place], lengths))
        )
        whole = work_units[index]
        work_units[index : index + 1] = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    work_units.sort(key=lambda work_unit: -_cost(work_unit, lengths))
    return [tuple(sorted(work_unit)) for work_unit in work_units]


def consecutive_batches(groups: range, size: int) -> list[tuple[int, ...]]:
    """Split groups into work units of `size` groups, in order."""
    return _in_batches(groups, size)


def evaluation_batches(prompts: Sequence[int], size: int, usual: int, num_slots: int) -> list[tuple[int, ...]]:
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
    work_units: list[list[int]] = []
    for group in order:
        # The first group is the longest, and so sets the padded length.
        if work_units and len(work_units[-1]) < min(most, limit // lengths[work_units[-1][0]]):
            work_units[-1].append(group)
        else:
            work_units.append([group])
    return work_units


def _cost(work_unit: Sequence[int], lengths: Sequence[int]) -> int:
    return len(work_unit) * max(lengths[group] for group in work_unit)
