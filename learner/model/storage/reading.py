"""Reading tensors from files in several threads, each byte once and straight to where it belongs.

What is in the precision of its destination, on the CPU, is read into the destination's own memory. Anything else goes
through a small buffer of the thread, from which it is cast or copied to the GPU.
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
_FEWEST_SHARED = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Numbers that stand together in a file, and where they go."""

    path: Path
    """The file."""
    begin: int
    """The first byte of them."""
    dtype: torch.dtype
    """What they are in the file."""
    destination: Tensor
    """[N] where they go: in one piece, of any type, on any device."""

    @property
    def num_bytes(self) -> int:
        """What they take in the file."""
        return self.destination.numel() * self.dtype.itemsize

    @property
    def is_staged(self) -> bool:
        """Whether it goes through a buffer: what is on the CPU and in the file's precision is read to its place."""
        return self.destination.is_cuda or self.destination.dtype is not self.dtype

    def chunks(self) -> Iterator[Extent]:
        """The same in parts that fit a buffer."""
        size = _CHUNK_BYTES // self.dtype.itemsize
        for first in range(0, self.destination.numel(), size):
            part = self.destination[first : first + size]
            yield replace(self, begin=self.begin + first * self.dtype.itemsize, destination=part)


def read_extents(extents: Sequence[Extent], progress: Throughput | None = None) -> None:
    """Read all of them.

    Raises ValueError where a file is shorter than it should be, OSError where it cannot be read.
    """
    chunks = [chunk for extent in sorted(extents, key=_place) for chunk in extent.chunks()]
    count = min(num_threads(), len(chunks))
    buffers = SimpleQueue[Tensor]()
    staged = [chunk for chunk in chunks if chunk.is_staged]
    for _ in range(count if staged else 0):
        # Here and not in the threads, which know less of the device.
        buffer = torch.empty(max(chunk.num_bytes for chunk in staged), dtype=torch.uint8)
        buffers.put(buffer.pin_memory() if staged[0].destination.is_cuda else buffer)
    with ExitStack() as stack:
        paths = {chunk.path for chunk in chunks}
        files = {path: stack.enter_context(path.open("rb", buffering=0)).fileno() for path in paths}

        def read(chunk: Extent) -> int:
            _read_chunk(chunk, files[chunk.path], buffers)
            return chunk.num_bytes

        # What is small is read before a thread has started.
        each = map if count < _FEWEST_SHARED else stack.enter_context(ThreadPoolExecutor(count, "d1-reading")).map
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
    # By its address: a tensor that numpy has seen cannot be resized any more, as a learner that sleeps resizes its own.
    left, begin = memoryview((ctypes.c_ubyte * chunk.num_bytes).from_address(into.data_ptr())), chunk.begin
    while left:
        num_bytes = os.preadv(file, [left], begin)
        if not num_bytes:
            raise ValueError(f"{chunk.path} cannot be read, get it again: it ends at byte {begin}")
        left, begin = left[num_bytes:], begin + num_bytes
