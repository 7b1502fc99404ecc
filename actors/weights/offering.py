"""Offering shards: what a rank of the learner holds, until the weight store has taken it.

The store calls each rank's actor for its rows: what such a call returns is the caller's, lies in the object store of
the rank's machine, and outlives the rank. So weights go there once, and never through another process. In a module
without torch: the store imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_offered: dict[str, Mapping[str, NDArray[np.uint8]]] = {}


def offer(key: str, rows: Mapping[str, NDArray[np.uint8]]) -> None:
    """Let `taken` have these under a key, and nothing else."""
    _offered.clear()
    _offered[key] = rows


def withdraw() -> None:
    """Offer nothing any more."""
    _offered.clear()


def taken(_: Any, key: str) -> tuple[Mapping[str, NDArray[np.uint8]], int]:
    """What this process offers, called in a rank's actor; and its bytes, for a caller that only waits for it.

    Raises LookupError where it is not offered (any more).
    """
    rows = _offered.get(key)
    if rows is None:
        raise LookupError(f"this rank does not offer {key}")
    return rows, sum(array.nbytes for array in rows.values())
