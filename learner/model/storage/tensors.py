"""Tensors of safetensors files, of which any range of rows can be read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from learner.model.families.layout import Piece, pieces_in_range, rows_of
from learner.model.storage.reading import Extent, read_extents

# Types by their safetensors names. Quantised types are left out: their numbers mean nothing without their scales.
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
# A safetensors file begins with the length of its header.
_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredHeader:
    """Location and type of one of a checkpoint's tensors."""

    path: Path
    """Its file."""
    begin: int
    """Offset of its first byte in the file."""
    dtype: torch.dtype
    """Type of its numbers."""
    shape: list[int]
    """Its shape in the file."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One of our parameters in a checkpoint's files; any range of its rows can be read."""

    shape: Sequence[int]
    """Shape of our parameter."""
    pieces: Sequence[Piece]
    """The parts of the checkpoint's tensors that it consists of."""
    stored: Mapping[str, StoredHeader]
    """The checkpoint's tensors by name."""

    def __getitem__(self, rows: slice) -> Tensor:
        """Read a range of rows, on the CPU."""
        begin, end, _ = rows.indices(self.shape[0])
        kinds = (self.stored[piece.stored].dtype for piece in self.pieces)
        found = torch.empty(end - begin, *self.shape[1:], dtype=reduce(torch.promote_types, kinds))
        read_extents(list(self.extents(rows, found)))
        return found

    def extents(self, rows: slice, destination: Tensor) -> Iterator[Extent]:
        """Yield the extents in the files of a range of rows, for a contiguous destination of their shape."""
        begin, end, _ = rows.indices(self.shape[0])
        inner, width = rows_of(self.shape) // self.shape[0], self.shape[-1] if len(self.shape) > 1 else 1
        numbers, first = destination.view(-1), 0
        assert len(numbers) == (end - begin) * inner * width, "a destination has the shape of its rows"
        for name, part in pieces_in_range(self.pieces, begin * inner, end * inner):
            held, after = self.stored[name], first + (part.stop - part.start) * width
            yield Extent(
                path=held.path,
                begin=held.begin + part.start * width * held.dtype.itemsize,
                dtype=held.dtype,
                destination=numbers[first:after],
            )
            first = after


def read_header(path: Path) -> dict[str, StoredHeader]:
    """Read the header of a file, by tensor name. Raises ValueError if the file is damaged or truncated."""
    try:
        # `safe_open` checks the header, and the file's length against it.
        with safe_open(path, framework="pt"), path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = {name: about for name, about in json.loads(file.read(length)).items() if name != "__metadata__"}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read, get it again: {error}") from error
    for name, about in header.items():
        if about["dtype"] not in _DTYPES:
            kind, readable = about["dtype"], ", ".join(_DTYPES)
            raise ValueError(f"{path}: {name} is {kind}; d1 reads {readable}, not quantised weights")
    return {
        name: StoredHeader(
            path=path,
            begin=_LENGTH_BYTES + length + about["data_offsets"][0],
            dtype=_DTYPES[about["dtype"]],
            shape=about["shape"],
        )
        for name, about in header.items()
    }
