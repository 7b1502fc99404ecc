"""GPU specifications from data sheets, by Ray's `accelerator_type`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class GpuKind(NamedTuple):
    """One kind of GPU."""

    name: str
    """Ray's `accelerator_type`."""
    memory_bytes: int
    """Its memory."""
    flop_per_s: float
    """Dense bfloat16 FLOP per second."""


GPU_KINDS = {
    kind.name: kind
    for kind in (
        GpuKind("L4", 24 * 10**9, 121e12),
        GpuKind("L40S", 48 * 10**9, 362e12),
        GpuKind("A100-40G", 40 * 2**30, 312e12),
        GpuKind("A100-80G", 80 * 2**30, 312e12),
        GpuKind("H100", 80 * 2**30, 989e12),
        GpuKind("H200", 141 * 10**9, 989e12),
        GpuKind("B200", 180 * 10**9, 2250e12),
    )
}
"""The kinds that plans support."""
DEFAULT_KIND = "H100"
"""The kind of a plan that names none."""
_RAY_PREFIX = "accelerator_type:"


def smallest_memory(resources: Iterable[str]) -> int | None:
    """Return the memory of the smallest GPU kind among a cluster's resource names; None without GPUs or if unknown."""
    names = [name.removeprefix(_RAY_PREFIX) for name in resources if name.startswith(_RAY_PREFIX)]
    if not names or any(name not in GPU_KINDS for name in names):
        return None
    return min(GPU_KINDS[name].memory_bytes for name in names)
