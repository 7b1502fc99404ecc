"""Seed derivation: hash a seed and keys into a new seed, identical in every process.

Integer arithmetic only, so that planning needs no torch. `learner.counter` draws random numbers by the same hash.
"""

from __future__ import annotations

import hashlib

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK_64 = (1 << 64) - 1


def fold(seed: int, *keys: int) -> int:
    """Hash a seed and keys into a new 63-bit seed; `fold(fold(s, a), b) == fold(s, a, b)`."""
    state = seed & MASK_64
    for key in keys:
        state = _finalise((state ^ (key & MASK_64)) + GAMMA & MASK_64) >> 1
    return state


def key_of(text: str) -> int:
    """Hash a name into a stable 63-bit key (Python's own `hash` changes from process to process)."""
    return key_of_bytes(text.encode())


def key_of_bytes(data: bytes) -> int:
    """Hash bytes into a stable 63-bit key."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1


def _finalise(state: int) -> int:
    state = (state ^ (state >> 30)) * MIX_1 & MASK_64
    state = (state ^ (state >> 27)) * MIX_2 & MASK_64
    return state ^ (state >> 31)
