"""Shards: files in which each rank of a learner wrote its rows of some tensors; any rows can be read from them.

The offsets of a file's rows are in its metadata, where torch's `HuggingFaceStorageReader` expects them. A file without
such metadata has whole tensors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from learner.model.families.layout import Piece, rows_of
from learner.model.storage.tensors import StoredHeader, StoredTensor, read_header

SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Metadata key of a shard: JSON with the offsets of its rows by tensor."""


def read_shards(paths: Sequence[Path]) -> dict[str, StoredTensor | Tensor]:
    """Open the tensors of all shards of a checkpoint, by name. Only headers and scalars are read.

    Raises ValueError if a file is damaged, or rows are missing.
    """
    found: dict[str, list[tuple[int, StoredHeader]]] = {}
    for path in paths:
        begins = _begins(path)
        for name, header in read_header(path).items():
            found.setdefault(name, []).append((begins.get(name, 0), header))
    return {name: _joined(name, sorted(parts, key=lambda part: part[0])) for name, parts in found.items()}


def _joined(name: str, parts: Sequence[tuple[int, StoredHeader]]) -> StoredTensor | Tensor:
    """Join the rows of a tensor's shards, in their order."""
    first = parts[0][1]
    if not first.shape:
        return _joined(name, [(0, replace(first, shape=[1]))])[:].reshape(())
    num_rows, pieces = 0, []
    for index, (begin, header) in enumerate(parts):
        if begin != num_rows or header.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"{header.path} does not have row {num_rows} of {name}, the next one; a shard is missing, or of "
                "another checkpoint"
            )
        inner = rows_of(header.shape) // header.shape[0]
        our_begin, num_inner = begin * inner, header.shape[0] * inner
        pieces.append(Piece(ours=name, our_begin=our_begin, stored=str(index), stored_begin=0, num_rows=num_inner))
        num_rows += header.shape[0]
    stored = {str(index): header for index, (_, header) in enumerate(parts)}
    return StoredTensor([num_rows, *first.shape[1:]], pieces, stored)


def _begins(path: Path) -> dict[str, int]:
    """Read the first row of a shard's tensors by name; nothing if the file has whole tensors. Raises ValueError."""
    with safe_open(path, framework="numpy") as file:
        listed = (file.metadata() or {}).get(SHARDING, "{}")
    try:
        return {name: int((*about[OFFSETS], 0)[0]) for name, about in json.loads(listed).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: it does not say which rows it has") from error
