"""Checkpoint saving: how long training waits for a checkpoint of all weights and moments, and what rank 0 holds.

    python -m benchmarks.weights.saving [--gigabytes 1.5] [--ranks 2] [--rounds 3] [--directory DIR] [--out FILE]

Gloo ranks on CPUs write a checkpoint of float32 weights and AdamW's moments: in shards, as `d1 train` does with several
ranks, and as the baseline gathered on rank 0. Training waits while the contents are copied; they are then written in
the background, where the seconds also depend on the disk. Beside each copy stands one plain copy of a rank's shards to
new memory, which is the limit. Medians are of some rounds, in which both ways alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from benchmarks.models import Shape, empty_policy
from learner.model.checkpoint import save_checkpoint
from learner.optimizer import PolicyOptimizer
from learner.parallel.sharded_saving import StagedTensors, make_group, save_shards
from learner.parallel.sharded_tensors import local_part
from learner.parallel.sharding import ShardedPolicy, make_mesh

_D_MODEL, _VOCABULARY, _TOKENS = 2048, 8192, 128
# Weights and two moments.
_NUM_COPIES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Measurements of one way to save; seconds are medians."""

    way: str
    num_ranks: int
    num_bytes: int
    """Size of the checkpoint's tensors."""
    bytes_of_rank_0: int
    """Bytes that rank 0 copies and holds until they are written."""
    waits_s: float
    """Seconds that training waits: of the slowest rank, from a common start."""
    waits_cpu_s: float
    """CPU seconds of that rank meanwhile: what it would wait on idle cores, without the ranks' exchange."""
    writes_s: float
    """Seconds from then until the checkpoint is complete."""
    copy_s: float
    """Seconds of a plain copy of a rank's shards to new memory."""


class Saver:
    """One rank with a policy and its optimizer."""

    def __init__(self, gigabytes: float) -> None:
        layer = 13 * _D_MODEL**2
        num_layers = max(1, round((gigabytes * 1e9 / 4 / _NUM_COPIES - 2 * _VOCABULARY * _D_MODEL) / layer))
        shape = Shape(d_model=_D_MODEL, num_layers=num_layers, num_heads=16, vocab_size=_VOCABULARY)
        self.policy = ShardedPolicy(empty_policy(shape, _TOKENS), make_mesh("cpu"))
        self._optimizer = PolicyOptimizer(self.policy, betas=(0.9, 0.99), weight_decay=0.0)
        for parameter in self.policy.trained_parameters.values():
            local_part(parameter.detach()).fill_(0.01)
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step(1e-3, 1.0, torch.tensor(0.0))
        self._group = make_group(int(gigabytes * 1e9))

    def shards(self) -> tuple[int, Callable[[Path], None]]:
        """Copy this rank's shards. Returns their bytes, and the function that writes them."""
        staged = StagedTensors.stage(self.policy.weights, self._optimizer.state())

        def write(directory: Path) -> None:
            save_shards(
                directory,
                staged,
                self._group,
                lambda shards: save_checkpoint(directory, self.policy.config, None, directory, shards=shards),
            )

        return _num_bytes(staged.local), write

    def gathered(self) -> tuple[int, Callable[[Path], None]]:
        """The same with everything on rank 0."""
        weights, state = self.policy.weights_on_rank_0(), self._optimizer.full_state()

        def write(directory: Path) -> None:
            if self.policy.rank == 0:
                save_checkpoint(directory, self.policy.config, weights, directory, learner_state=state)

        return _num_bytes(weights) + _num_bytes(state), write

    def copy_s(self) -> float:
        """Measure a plain copy of this rank's shards."""
        held = [local_part(tensor) for tensor in (*self.policy.weights.values(), *self._optimizer.state().values())]
        dist.barrier()
        began = time.monotonic()
        copies = [tensor.clone() for tensor in held]
        seconds = time.monotonic() - began
        del copies  # Releasing the memory is not timed.
        return seconds

    def num_bytes(self) -> int:
        """Return the size of all weights and moments."""
        return _NUM_COPIES * sum(4 * parameter.numel() for parameter in self.policy.weights.values())


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _rank(rank: int, gigabytes: float, num_ranks: int, rounds: int, place: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place / 'ranks'}", rank=rank, world_size=num_ranks)
    saver = Saver(gigabytes)
    ways = {"shards": saver.shards, "gathered": saver.gathered}
    taken: dict[str, list[tuple[float, float, float, float, int]]] = {way: [] for way in ways}
    for index in range(rounds):
        for way, copy in ways.items():
            copy_s = saver.copy_s()
            dist.barrier()
            began, cpu = time.monotonic(), time.process_time()
            num_bytes, write = copy()
            waited, cpu_s = time.monotonic() - began, time.process_time() - cpu
            write(place / f"{way}-{index}")
            dist.barrier()
            taken[way].append((waited, cpu_s, time.monotonic() - began - waited, copy_s, num_bytes))
    (place / f"{rank}.json").write_text(json.dumps({"num_bytes": saver.num_bytes(), "taken": taken}))
    dist.barrier()
    dist.destroy_process_group()


def measured(gigabytes: float, num_ranks: int, rounds: int, place: Path) -> list[Row]:
    """Measure both ways to save a checkpoint of `gigabytes`, in the directory `place`."""
    spawn(_rank, (gigabytes, num_ranks, rounds, place), nprocs=num_ranks)
    ranks = [json.loads((place / f"{rank}.json").read_text()) for rank in range(num_ranks)]

    def row(way: str) -> Row:
        slowest = [max(one[:4] for one in each) for each in zip(*(rank["taken"][way] for rank in ranks), strict=True)]
        waits_s, waits_cpu_s, writes_s, copy_s = (statistics.median(values) for values in zip(*slowest, strict=True))
        return Row(
            way=way,
            num_ranks=num_ranks,
            num_bytes=ranks[0]["num_bytes"],
            bytes_of_rank_0=ranks[0]["taken"][way][0][4],
            waits_s=waits_s,
            waits_cpu_s=waits_cpu_s,
            writes_s=writes_s,
            copy_s=copy_s,
        )

    return [row(way) for way in ranks[0]["taken"]]


def _table(rows: list[Row]) -> Table:
    table = Table("way", "GB", "GB on rank 0", "training waits, s", "CPU s", "then written in, s", "a copy, s")
    for row in rows:
        sizes = (f"{num_bytes / 1e9:.2f}" for num_bytes in (row.num_bytes, row.bytes_of_rank_0))
        table.add_row(
            row.way, *sizes, f"{row.waits_s:.2f}", f"{row.waits_cpu_s:.2f}", f"{row.writes_s:.1f}", f"{row.copy_s:.2f}"
        )
    return table


def main() -> None:
    """Run the benchmark, print a table, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.5, help="of weights and moments")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="on the disk to write to; default: the temporary one")
    parser.add_argument("--out", type=Path, help="where to write JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as place:
        rows = measured(args.gigabytes, args.ranks, args.rounds, Path(place))
    Console(width=120).print(_table(rows))
    if args.out is not None:
        args.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
