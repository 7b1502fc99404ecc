"""Checkpoint loading: throughput of verification and loading, and peak memory of a learner's ranks.

    python -m benchmarks.weights.loading [--checkpoint DIR] [--device cuda] [--gigabytes 1] [--ranks 2] [--out FILE]

Rates are those of one process reading from the page cache. Two limits are measured with the same threads: reading into
already allocated memory, and writing to fresh memory.

For the memory table, gloo ranks on CPUs load a checkpoint of float32 weights. It reports the growth of a rank's peak
resident size, mapped files included. The lower limit is the size of its shard.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.spawn import spawn

from benchmarks.models import Shape, empty_policy
from learner.model.checkpoint import load_policy, save_checkpoint, stored_dtype
from learner.model.checkpoint_files import weight_files
from learner.model.storage import hashing
from learner.model.storage.hashing import checksums
from learner.model.storage.throughput import num_threads
from learner.parallel.loading import load_by_rows
from learner.parallel.sharding import ShardedPolicy, make_mesh
from learner.parallel.sharding_config import ShardingConfig

_D_MODEL, _VOCABULARY, _TOKENS = 2048, 8192, 128
_BUFFER_BYTES, _REPEATS = 16 << 20, 3
_CPU, _PLAIN = torch.device("cpu"), ShardingConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Throughput of one operation on a checkpoint's weights, in the fastest of several tries."""

    what: str
    num_bytes: int
    """Bytes on disk."""
    seconds: float
    cpu_seconds: float
    """CPU seconds of all threads of the process."""
    slowest_seconds: float
    """Seconds of the slowest try."""


def rates(directory: Path, device: str = "cpu") -> list[Rate]:
    """Measure all operations on a checkpoint, for a device."""
    files = weight_files(directory)
    num_bytes, dtype = sum(path.stat().st_size for path in files), stored_dtype(directory)

    def check() -> None:
        hashing._known.clear()
        checksums(files)

    ways: dict[str, Callable[[], object]] = {
        "read, into memory that is there (limit)": lambda: _read(files),
        "write, to memory that is new (limit)": lambda: _touch(num_bytes),
        "check": check,
        f"load, on {device}": lambda: load_policy(directory, dtype, device),
    }
    _read(files)  # Into the page cache.
    found = []
    for what, do in ways.items():
        tries = sorted(_timed(do) for _ in range(_REPEATS))
        seconds, cpu_seconds = tries[0]
        rate = Rate(
            what=what, num_bytes=num_bytes, seconds=seconds, cpu_seconds=cpu_seconds, slowest_seconds=tries[-1][0]
        )
        found.append(rate)
    return found


def _timed(do: Callable[[], object]) -> tuple[float, float]:
    """Measure wall and CPU seconds of a call."""
    cpu, began = time.process_time(), time.monotonic()
    kept = do()
    seconds = time.monotonic() - began, time.process_time() - cpu
    del kept  # Releasing the memory is not timed.
    return seconds


def _read(files: Sequence[Path]) -> None:
    """Read files in equal shares of all bytes, as `load_policy` does."""
    spans = [(path, begin) for path in files for begin in range(0, path.stat().st_size, _BUFFER_BYTES)]
    count = num_threads()

    def read(thread: int) -> None:
        buffer = bytearray(_BUFFER_BYTES)
        for path, begin in spans[thread::count]:
            with path.open("rb", buffering=0) as file:
                file.seek(begin)
                file.readinto(buffer)

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(read, range(count)))


def _touch(num_bytes: int) -> torch.Tensor:
    memory, count = torch.empty(num_bytes, dtype=torch.uint8), num_threads()
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(lambda part: part.zero_(), memory.chunk(count)))
    return memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Measurements of one way to load, on the rank with the largest peak."""

    way: str
    num_ranks: int
    shard_bytes: int
    """Bytes of the shards of the weights that a rank holds afterwards."""
    peak_bytes: int
    """Growth of the rank's peak resident memory."""
    of_shard: float
    """`peak_bytes` divided by `shard_bytes`."""
    seconds: float
    """Seconds of the slowest rank."""


def _by_rows(directory: Path, mesh: DeviceMesh | None) -> ShardedPolicy:
    return load_by_rows(directory, mesh, _PLAIN, device=_CPU)


def _with_reference(directory: Path, mesh: DeviceMesh | None) -> ShardedPolicy:
    return _by_rows(directory, mesh).frozen_copy()


def _whole(directory: Path, mesh: DeviceMesh | None) -> ShardedPolicy:
    return ShardedPolicy(load_policy(directory), mesh)


WAYS: dict[str, tuple[Callable[[Path, DeviceMesh | None], ShardedPolicy], int]] = {
    "whole, then cut": (_whole, 1),
    "by rows": (_by_rows, 1),
    "by rows, and a reference": (_with_reference, 2),
}
"""Ways to load, and the number of shards of the weights that each leaves on a rank."""


def rows(gigabytes: float, num_ranks: int, ways: Sequence[str] = tuple(WAYS)) -> list[Row]:
    """Measure `ways` for a float32 policy of `gigabytes`."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        num_bytes = _checkpoint(place / "checkpoint", gigabytes)
        for way in ways:
            _, num_shards = WAYS[way]
            spawn(_rank, (way, num_ranks, place), nprocs=num_ranks)
            taken = [json.loads((place / f"{rank}.json").read_text()) for rank in range(num_ranks)]
            shard, peak = num_bytes * num_shards // num_ranks, max(each["peak_bytes"] for each in taken)
            seconds = max(each["seconds"] for each in taken)
            row = Row(
                way=way, num_ranks=num_ranks, shard_bytes=shard, peak_bytes=peak, of_shard=peak / shard, seconds=seconds
            )
            found.append(row)
    return found


def _checkpoint(directory: Path, gigabytes: float) -> int:
    block = 13 * _D_MODEL**2
    num_layers = max(1, round((gigabytes * 1e9 / 4 - 2 * _VOCABULARY * _D_MODEL) / block))
    policy = empty_policy(Shape(d_model=_D_MODEL, num_layers=num_layers, num_heads=16, vocab_size=_VOCABULARY), _TOKENS)
    weights = {name: parameter.detach().fill_(0.01) for name, parameter in policy.named_parameters()}
    save_checkpoint(directory, policy.config, weights, directory)
    return sum(weight.nbytes for weight in weights.values())


def _rank(rank: int, way: str, num_ranks: int, place: Path) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{place / way.replace(' ', '-')}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks)
    mesh = make_mesh("cpu")
    # Shard a small policy first, so that lazy imports are not measured.
    ShardedPolicy(empty_policy(Shape(d_model=32, num_layers=1, num_heads=2, vocab_size=40), _TOKENS), mesh)
    dist.barrier()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    began = time.monotonic()
    policy = WAYS[way][0](place / "checkpoint", mesh)
    taken = {"peak_bytes": _resident("VmHWM") - before, "seconds": time.monotonic() - began}
    assert policy.world_size == num_ranks
    (place / f"{rank}.json").write_text(json.dumps(taken))
    dist.barrier()
    dist.destroy_process_group()


def _resident(what: str) -> int:
    """Read `VmRSS` (current resident size) or `VmHWM` (peak since its last reset), in bytes."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, "Linux has both"
    return int(found[1]) * 1024


def main() -> None:
    """Run the benchmark and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--checkpoint", type=Path, help="a directory to measure rates of, and not one that is made")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the rows here too, a JSON object each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        if args.checkpoint is None:
            _checkpoint(Path(name) / "checkpoint", args.gigabytes)
        measured = rates(args.checkpoint or Path(name) / "checkpoint", args.device)
    table = Table("what", "GB", "seconds", "slowest", "CPU seconds", "GB/s")
    for rate in measured:
        numbers = rate.num_bytes / 1e9, rate.seconds, rate.slowest_seconds, rate.cpu_seconds
        table.add_row(rate.what, *(f"{number:.2f}" for number in (*numbers, rate.num_bytes / 1e9 / rate.seconds)))
    Console().print(table)
    found = rows(args.gigabytes, args.ranks)
    table = Table("way", "ranks", "shard, MB", "peak, MB", "of the shard", "seconds")
    for row in found:
        sizes = (f"{row.shard_bytes / 1e6:.0f}", f"{row.peak_bytes / 1e6:.0f}", f"{row.of_shard:.2f}")
        table.add_row(row.way, str(row.num_ranks), *sizes, f"{row.seconds:.1f}")
    Console().print(table)
    if args.out is not None:
        lines = [*(asdict(rate) for rate in measured), *(asdict(row) for row in found)]
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
