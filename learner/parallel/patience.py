"""How long what moves a policy's bytes is waited for: so long as they take on the slowest network or disk that counts.

A wait that is the same for every policy is too long to notice a fault of a small one, or too short for one of 8B
parameters, of which all weights take eleven minutes.
"""

from __future__ import annotations

SLOWEST_BYTES_PER_S = 50e6
"""What a network or a disk is waited for: less than half of 1 Gbit/s."""
COLLECTIVE_TIMEOUT_S = 900.0
"""Seconds that a rank waits for the others in one collective, beside what they read: for longer than their own share of
the same work takes. Who hangs is noticed long before, by other means."""


def patience_s(least_s: float, num_bytes: float) -> float:
    """Seconds that something may take which moves so many bytes, and `least_s` if it moved none."""
    return least_s + num_bytes / SLOWEST_BYTES_PER_S
