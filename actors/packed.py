"""Serialization of completions between processes: a column for each of their arrays, not thousands of short ones.

Ray takes longer over each array than over its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.request import Completion

_NAMES = [field.name for field in fields(Completion)]


class Completions(tuple[Completion, ...]):
    """Completions that are pickled as columns. What arrives are the same, with views of the columns for arrays."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """The columns."""
        if not self:
            return Completions, ()
        is_array = {name: isinstance(getattr(self[0], name), np.ndarray) for name in _NAMES}
        columns = {name: [getattr(completion, name) for completion in self] for name in _NAMES}
        # All arrays of a completion are as long as it.
        lengths = np.array([len(completion.token_ids) for completion in self])
        arrays = {name: np.concatenate(column) for name, column in columns.items() if is_array[name]}
        values = {name: column for name, column in columns.items() if not is_array[name]}
        return _unpacked, (lengths, arrays, values)


def _unpacked(
    lengths: NDArray[np.int64], arrays: Mapping[str, NDArray[Any]], values: Mapping[str, Sequence[Any]]
) -> Completions:
    spans = [slice(begin, end) for begin, end in pairwise([0, *lengths.cumsum().tolist()])]

    def completion(index: int) -> Completion:
        own: dict[str, Any] = {name: column[spans[index]] for name, column in arrays.items()}
        return Completion(**own, **{name: column[index] for name, column in values.items()})

    return Completions(map(completion, range(len(spans))))
