"""Multithreaded reading of tensors from files directly into their destinations; each byte is read once.

If the destination is on the CPU and has the file's precision, the bytes are read into its memory. Otherwise they go
through a small staging buffer, from which they are cast or copied to the GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from learner.model.storage.throughput import Throughput, num_threads

_CHUNK_BYTES = 16 << 20
_MIN_CHUNKS_FOR_THREADS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Contiguous numbers of a file, and their destination."""

    path: Path
    """The file."""
    begin: int
    """Offset of their first byte in the file."""
    dtype: torch.dtype
    """Their type in the file."""
    destination: Tensor
    """[N] contiguous tensor that they are read into, of any type, on any device."""

    @property
    def num_bytes(self) -> int:
        """Their size in the file."""
        return self.destination.numel() * self.dtype.itemsize

    @property
    def is_staged(self) -> bool:
        """Whether they go through a staging buffer, for a cast or a copy to the GPU."""
        return self.destination.is_cuda or self.destination.dtype is not self.dtype

    def chunks(self) -> Iterator[Extent]:
        """Split into parts that fit a staging buffer."""
        size = _CHUNK_BYTES // self.dtype.itemsize
        for first in range(0, self.destination.numel(), size):
            part = self.destination[first : first + size]
            yield replace(self, begin=self.begin + first * self.dtype.itemsize, destination=part)


def read_extents(extents: Sequence[Extent], progress: Throughput | None = None) -> None:
    """Read all extents.

    Raises ValueError if a file is too short, OSError if it cannot be read.
    """
    chunks = [chunk for extent in sorted(extents, key=_place) for chunk in extent.chunks()]
    count = min(num_threads(), len(chunks))
    buffers = SimpleQueue[Tensor]()
    staged = [chunk for chunk in chunks if chunk.is_staged]
    for _ in range(count if staged else 0):
        # Not in the threads: the current CUDA device is set for the calling thread only.
        buffer = torch.empty(max(chunk.num_bytes for chunk in staged), dtype=torch.uint8)
        buffers.put(buffer.pin_memory() if staged[0].destination.is_cuda else buffer)
    with ExitStack() as stack:
        paths = {chunk.path for chunk in chunks}
        files = {path: stack.enter_context(path.open("rb", buffering=0)).fileno() for path in paths}

        def read(chunk: Extent) -> int:
            _read_chunk(chunk, files[chunk.path], buffers)
            return chunk.num_bytes

        # A single chunk is read before a thread would have started.
        each = (
            map if count < _MIN_CHUNKS_FOR_THREADS else stack.enter_context(ThreadPoolExecutor(count, "d1-reading")).map
        )
        for num_bytes in each(read, chunks):
            if progress is not None:
                progress.add(num_bytes)


def _place(extent: Extent) -> tuple[Path, int]:
    return extent.path, extent.begin


def _read_chunk(chunk: Extent, file: int, buffers: SimpleQueue[Tensor]) -> None:
    if not chunk.is_staged:
        _read(chunk, file, chunk.destination)
        return
    buffer = buffers.get()
    try:
        staged = buffer[: chunk.num_bytes].view(chunk.dtype)
        _read(chunk, file, staged)
        chunk.destination.copy_(staged)
    finally:
        buffers.put(buffer)


def _read(chunk: Extent, file: int, into: Tensor) -> None:
    # By address, not by `Tensor.numpy`: a tensor exported to numpy cannot be resized, which offloading a learner does.
    left, begin = memoryview((ctypes.c_ubyte * chunk.num_bytes).from_address(into.data_ptr())), chunk.begin
    while left:
        num_bytes = os.preadv(file, [left], begin)
        if not num_bytes:
            raise ValueError(f"{chunk.path} cannot be read, get it again: it ends at byte {begin}")
        left, begin = left[num_bytes:], begin + num_bytes
