"""Timeouts scaled by transfer size, at the throughput of the slowest supported network or disk.

A single timeout for all policies would detect a fault of a small one late, or be too short for one of 8B parameters,
whose weights take eleven minutes.
"""

from __future__ import annotations

SLOWEST_BYTES_PER_S = 50e6
"""Lowest supported throughput of a network or disk: less than half of 1 Gbit/s."""
COLLECTIVE_TIMEOUT_S = 900.0
"""Timeout of a collective, in seconds, without the time to read weights. It exceeds what the other ranks' share of the
same work takes. Hangs are detected much earlier, by other means."""


def transfer_timeout_s(base_s: float, num_bytes: float) -> float:
    """Return the timeout of an operation that moves `num_bytes`, in seconds; `base_s` if it moves none."""
    return base_s + num_bytes / SLOWEST_BYTES_PER_S
