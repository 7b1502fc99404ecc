"""Shards that a learner rank offers until the weight store has taken them.

The store calls each rank's actor for its rows. The result of such a call is owned by the caller, is in the object store
of the rank's machine, and outlives the rank. So weights are copied once, and not through another process. This module
must not import torch, because the store imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_offered: dict[str, Mapping[str, NDArray[np.uint8]]] = {}


def offer(key: str, rows: Mapping[str, NDArray[np.uint8]]) -> None:
    """Offer these rows under a key, instead of any earlier offer."""
    _offered.clear()
    _offered[key] = rows


def withdraw() -> None:
    """Withdraw the offer."""
    _offered.clear()


def offered_rows(_: Any, key: str, num_pieces: int) -> tuple[Mapping[str, NDArray[np.uint8]] | int, ...]:
    """Return the rows that this process offers, in pieces, and their bytes; called in a rank's actor.

    A caller that only waits for the rows can wait for the number. Raises LookupError if the key is not offered (any
    more).
    """
    rows = _offered.get(key)
    if rows is None:
        raise LookupError(f"this rank does not offer {key}")
    return *in_pieces(rows, num_pieces), sum(array.nbytes for array in rows.values())


def in_pieces(rows: Mapping[str, NDArray[np.uint8]], num_pieces: int) -> list[dict[str, NDArray[np.uint8]]]:
    """Split tensors into pieces of about the same size, in their order. No tensor is split, so pieces may be empty."""
    pieces: list[dict[str, NDArray[np.uint8]]] = [{} for _ in range(num_pieces)]
    total, before = sum(array.nbytes for array in rows.values()), 0
    for name, array in rows.items():
        # By its middle: a tensor that is larger than a piece has one to itself.
        pieces[(2 * before + array.nbytes) * num_pieces // (2 * total) if array.nbytes else 0][name] = array
        before += array.nbytes
    return pieces
