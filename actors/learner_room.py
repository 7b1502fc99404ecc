"""Room for the learner's workers on the cluster: how many fit, and what a group without room waits for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from actors.resources import learner_resources
from actors.spec import RunSpec

_PROBE_TIMEOUT_S = 5.0
_WAITING = ("PENDING", "RESCHEDULING")


def placeable_workers(spec: RunSpec) -> int | None:
    """Return the largest number of workers that the recipe allows and Ray can place now; None if not the fewest.

    It reserves their resources for a moment, as Ray Train does.
    """
    sizes = spec.learner_sizes
    # If a number fits, every smaller one does.
    first = bisect_left(range(len(sizes)), True, key=lambda index: _fits(spec, sizes[index]))
    return sizes[first] if first < len(sizes) else None


def _fits(spec: RunSpec, num_workers: int) -> bool:
    labels = dict(spec.placement.learner_labels)
    options: dict[str, Any] = {"bundle_label_selector": [labels] * num_workers} if labels else {}
    bundles = [learner_resources(spec.device, spec.gpus.learner_request)] * num_workers
    group = placement_group(bundles, strategy=spec.placement.learner, **options)
    try:
        return bool(group.wait(_PROBE_TIMEOUT_S))
    finally:
        remove_placement_group(group)


def missing_room(spec: RunSpec) -> str:
    """Return what a learner group without room waits for, such as `1 more GPU of 4`; empty if no group waits.

    It asks Ray's GCS, which takes milliseconds, or for ever while that is down.
    """
    request = learner_resources(spec.device, spec.gpus.learner_request)
    waiting = [
        len(group["bundles"])
        for group in placement_group_table().values()
        if group["state"] in _WAITING and all(bundle == request for bundle in group["bundles"].values())
    ]
    return room_text(spec, max(waiting), ray.available_resources()) if waiting else ""


def room_text(spec: RunSpec, num_workers: int, free: Mapping[str, Any]) -> str:
    """Describe the room that `num_workers` workers need, and what is missing from the `free` resources."""
    request = learner_resources(spec.device, spec.gpus.learner_request)
    unit = "GPU" if spec.device == "cuda" else "CPU"
    needed = num_workers * request[unit]
    missing = round(needed - free.get(unit, 0.0), 4)
    on = "".join(f" on nodes with {label} {value}" for label, value in spec.placement.learner_labels.items())
    if missing <= 0:
        # It is free in parts that are too small, or on other nodes.
        return f"room for {num_workers} workers of {request[unit]:g} {unit} each{on}"
    return f"{missing:g} more {unit}{'' if missing == 1 else 's'} of {needed:g}{on}"
