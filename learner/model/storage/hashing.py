"""SHA-256 of files, in several threads, with a cache in the process for unchanged files."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from learner.model.storage.throughput import Throughput, num_threads

_CHUNK_BYTES = 4 << 20
# Timestamps of file systems are coarse: a file written just now may be rewritten with the same timestamp.
_SETTLED_NS = 2_000_000_000

# Cache keyed by device, inode, size, mtime and ctime, which identify an unchanged file.
_known: dict[tuple[int, ...], str] = {}


def checksums(paths: Sequence[Path], progress: Throughput | None = None) -> dict[Path, str]:
    """Compute the SHA-256 of files, in hexadecimal. Raises OSError if one cannot be read."""
    if len(paths) < 2:
        return {path: checksum(path, progress) for path in paths}
    largest_first = sorted(paths, key=lambda path: path.stat().st_size, reverse=True)
    with ThreadPoolExecutor(num_threads(), "d1-hashing") as threads:
        return dict(zip(largest_first, threads.map(lambda path: checksum(path, progress), largest_first), strict=True))


def checksum(path: Path, progress: Throughput | None = None) -> str:
    """Compute the SHA-256 of a file, in hexadecimal. Raises OSError if it cannot be read."""
    with path.open("rb", buffering=0) as file:
        about = os.fstat(file.fileno())
        key = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
        if (known := _known.get(key)) is not None:
            if progress is not None:
                progress.add(about.st_size)
            return known
        is_settled = time.time_ns() - max(about.st_mtime_ns, about.st_ctime_ns) > _SETTLED_NS
        digest, buffer = hashlib.sha256(), memoryview(bytearray(min(_CHUNK_BYTES, about.st_size + 1)))
        while num_bytes := file.readinto(buffer):
            digest.update(buffer[:num_bytes])
            if progress is not None:
                progress.add(num_bytes)
    if is_settled:
        _known[key] = digest.hexdigest()
    return digest.hexdigest()
