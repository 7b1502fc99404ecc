"""Weight sync: time from the learner's ranks to the samplers on Ray, for all weights or an adapter.

    python -m benchmarks.weights.publishing [--gigabytes 1 4] [--samplers 1 2 4] [--rank 16] [--rounds 3] [--out FILE]

A policy of random float32 weights is sharded over two ranks, published as by `d1 train`, and loaded in place by every
sampler. It is sent as shards (each rank's rows) to float32 and bfloat16 samplers, and as an adapter. The baseline
`gathered` gathers all weights on rank 0, puts them, and the store puts them again.

Seconds are from the ranks' call to the last sampler's answer: the median of some rounds, each next to one plain memory
copy of all weights. The pause is the time during which a sampler does not sample. It fetches, verifies and copies a
version, or only copies it if it was prefetched during the previous work unit (`staged`). Cases that exceed this
machine's memory are skipped with a message.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from actors.messages import WeightsId
from actors.spec import Phase
from actors.training.publication import Publisher
from actors.training.run_client import RunClient
from actors.training.shards import TransferFormat
from actors.weights.fetching import PolicyLoader, PrefetchingReader, StoreReader
from actors.weights.store import WeightStore
from actors.weights.tensors import make_manifest
from benchmarks.models import Shape, empty_policy
from deploy import machine
from deploy.ray_session import ray_session
from learner.model.checkpoint import save_checkpoint
from learner.model.checkpoint_files import BaseCheckpoint, chain_digest
from learner.model.lora_config import FULL_FINE_TUNING, LoraConfig
from learner.model.transformer import Transformer
from learner.parallel.consensus import Ranks
from learner.parallel.sharding import ShardedPolicy, make_mesh

_D_MODEL, _VOCABULARY, _TOKENS, _TIMEOUT_S, _RANKS = 2048, 8192, 128, 600.0, 2
# Copies of the weights: the learner's, the gathered one, two puts and the plain copy; then those of each sampler.
_COPIES, _COPIES_OF_SAMPLER = 6, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Form in which a version is sent."""

    name: str
    is_gathered: bool = False
    lora: LoraConfig = FULL_FINE_TUNING
    samplers_dtype: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Measurements of one policy size, number of samplers and form."""

    gigabytes: float
    """Size of all weights in float32."""
    num_samplers: int
    form: str
    megabytes: float
    """Size of a version in the store."""
    share: float
    """Share of the bytes of all weights."""
    seconds: float
    """Median seconds from the learner to the last sampler."""
    first_s: float
    """Seconds of the first version, which includes an adapter's base."""
    copy_s: float
    """Median seconds of a plain memory copy of all weights."""
    pause_s: float
    """Median pause of the slowest sampler, seconds."""
    staged_pause_s: float
    """The same with a prefetched version."""


class Client(RunClient):
    """The learner's client, without a service to notify."""

    def announce(self, weights_id: WeightsId, phase: Phase, round_index: int) -> None:
        """Do nothing."""


class LearnerRank:
    """Learner rank that only publishes."""

    def __init__(self, shape: Shape, form: Form, store: Any, rank: int, meeting: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", f"file://{meeting}", timedelta(seconds=_TIMEOUT_S), world_size=_RANKS, rank=rank
        )
        model = empty_policy(shape, _TOKENS)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        base = _written(model, form.lora, Path(meeting).parent) if form.lora.rank and rank == 0 else None
        self._policy = ShardedPolicy(model, make_mesh("cpu"), lora=form.lora)
        self._store, self._ranks, self._is_gathered = store, Ranks(), form.is_gathered
        self._publisher = Publisher(
            self._policy, self._ranks, Client(None, store), transfer_format=TransferFormat(dtype=form.samplers_dtype)
        )
        self._publisher.base = base

    def ready(self) -> None:
        """Return once the actor has started."""

    def publish(self, version: int) -> WeightsId | None:
        """Publish a version to the store. Returns its id on rank 0."""
        with torch.no_grad():
            for parameter in self._policy.trained_parameters.values():
                parameter.add_(1e-3)
        if self._is_gathered:
            return self._publish_gathered(version)
        self._publisher.publish(version, Phase.RL, version)
        return self._publisher.newest if self._ranks.rank == 0 else None

    def _publish_gathered(self, version: int) -> WeightsId | None:
        weights = self._policy.weights_on_rank_0()
        if self._ranks.rank:
            return None
        manifest = make_manifest(version, weights)
        Client(None, self._store).publish(manifest, weights)
        return WeightsId(version=version, digest=manifest.digest)


def _written(model: Transformer, lora: LoraConfig, checkpoints_dir: Path) -> BaseCheckpoint:
    """Write the adapters' base checkpoint where samplers read it."""
    directory = checkpoints_dir / "initial"
    save_checkpoint(directory, model.config, dict(model.named_parameters()), checkpoints_dir)
    return BaseCheckpoint(checkpoint=directory.name, digest=chain_digest(directory), scaling=lora.scaling)


class Receiver:
    """Sampler that only loads weights."""

    def __init__(self, shape: Shape, form: Form, store: Any, checkpoints_dir: Path) -> None:
        torch.set_num_threads(1)
        policy = empty_policy(shape, _TOKENS).to(form.samplers_dtype)
        self._reader = PrefetchingReader(StoreReader(store, _TIMEOUT_S))
        self._loader = PolicyLoader(policy, self._reader, checkpoints_dir)

    def ready(self) -> None:
        """Return once the actor has started."""

    def prefetch(self, weights_id: WeightsId) -> None:
        """Prefetch a version."""
        self._reader.prefetch(weights_id)

    def load(self, weights_id: WeightsId) -> float:
        """Load a version into the policy. Returns the seconds that it took."""
        began = time.perf_counter()
        self._loader.load(weights_id)
        return time.perf_counter() - began


class Line:
    """A learner with two ranks, a weight store and samplers."""

    def __init__(self, shape: Shape, form: Form, num_samplers: int, meeting: str) -> None:
        self.store: Any = ray.remote(WeightStore).options(num_cpus=0).remote(1)
        # As in Ray Train, the store can call a rank while the rank's training waits for the store.
        rank = ray.remote(LearnerRank).options(num_cpus=0, max_concurrency=2)
        self._ranks: list[Any] = [rank.remote(shape, form, self.store, index, meeting) for index in range(_RANKS)]
        receiver = ray.remote(Receiver).options(num_cpus=0)
        arguments = shape, form, self.store, Path(meeting).parent
        self._receivers: list[Any] = [receiver.remote(*arguments) for _ in range(num_samplers)]
        self._actors = [self.store, *self._ranks, *self._receivers]
        ray.get([one.ready.remote() for one in self._actors], timeout=_TIMEOUT_S)
        self._version = 0

    def send(self, *, is_staged: bool = False) -> tuple[float, float]:
        """Send a version to all samplers. Returns the seconds, and the pause of the slowest sampler."""
        self._version += 1
        began = time.perf_counter()
        said = ray.get([rank.publish.remote(self._version) for rank in self._ranks], timeout=_TIMEOUT_S)
        if is_staged:
            ray.get([receiver.prefetch.remote(said[0]) for receiver in self._receivers], timeout=_TIMEOUT_S)
        pauses = ray.get([receiver.load.remote(said[0]) for receiver in self._receivers], timeout=_TIMEOUT_S)
        return time.perf_counter() - began, max(pauses)

    def num_bytes(self) -> int:
        """Return the bytes of the newest version."""
        manifest, _ = ray.get(self.store.get.remote(self._version), timeout=_TIMEOUT_S)
        return sum(entry.num_bytes for entry in manifest.tensors)

    def end(self) -> None:
        """Stop the actors and release their memory."""
        for actor in self._actors:
            ray.kill(actor)


def main() -> None:
    """Run the benchmark, print a table, and write it to `--out`."""
    args = _arguments()
    torch.set_num_threads(1)
    console = Console(width=140)
    rows: list[Row] = []
    with ray_session(dashboard=False):
        for gigabytes in args.gigabytes:
            for num_samplers in args.samplers:
                needed = (_COPIES + _COPIES_OF_SAMPLER * num_samplers) * gigabytes * 1e9
                if needed > 0.8 * machine.memory_bytes():
                    console.print(
                        f"{gigabytes:g} GB to {num_samplers}: needs {needed / 1e9:.0f} GB of memory; left out"
                    )
                    continue
                rows += measured(gigabytes, num_samplers, args.rank, args.rounds)
                console.print(f"{gigabytes:g} GB to {num_samplers}: done")
    console.print(_table(rows))
    if args.out is not None:
        args.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def measured(gigabytes: float, num_samplers: int, rank: int, rounds: int) -> Iterator[Row]:
    """Measure all forms and a plain copy for each. Forms run in sequence, as memory does not suffice for several."""
    shape = _shape(gigabytes)
    forms = (
        Form(name="gathered", is_gathered=True),
        Form(name="shards"),
        Form(name="shards, bfloat16", samplers_dtype=torch.bfloat16),
        Form(name="adapter", lora=LoraConfig(rank=rank, alpha=rank)),
    )
    for form in forms:
        with tempfile.TemporaryDirectory() as directory:
            line = Line(shape, form, num_samplers, f"{directory}/ranks")
            whole = [torch.ones_like(parameter) for parameter in empty_policy(shape, _TOKENS).parameters()]
            first_s, _ = line.send()
            taken, staged_pauses, copies = [], [], []
            for _ in range(rounds):
                taken.append(line.send())
                staged_pauses.append(line.send(is_staged=True)[1])
                copies.append(_copy_s(whole))
            num_bytes = line.num_bytes()
            line.end()
        yield Row(
            gigabytes=gigabytes,
            num_samplers=num_samplers,
            form=form.name,
            megabytes=num_bytes / 1e6,
            share=num_bytes / sum(tensor.nbytes for tensor in whole),
            seconds=statistics.median(seconds for seconds, _ in taken),
            first_s=first_s,
            copy_s=statistics.median(copies),
            pause_s=statistics.median(pause for _, pause in taken),
            staged_pause_s=statistics.median(staged_pauses),
        )


def _copy_s(tensors: Sequence[Tensor]) -> float:
    copies = [torch.ones_like(tensor) for tensor in tensors]  # Touch the pages before the clock starts.
    began = time.perf_counter()
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    return time.perf_counter() - began


def _shape(gigabytes: float) -> Shape:
    """Choose a shape with about this many bytes in float32."""
    of_layer = 4 * (4 * _D_MODEL**2 + 9 * _D_MODEL**2)
    rest = 4 * 2 * _VOCABULARY * _D_MODEL
    num_layers = max(1, round((gigabytes * 1e9 - rest) / of_layer))
    return Shape(d_model=_D_MODEL, num_layers=num_layers, num_heads=16, vocab_size=_VOCABULARY)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(
        "weights",
        "samplers",
        "form",
        "MB a version",
        "share",
        "s",
        "copies",
        "first, s",
        "a copy, s",
        "pause, s",
        "staged",
    )
    for row in rows:
        table.add_row(
            f"{row.gigabytes:g} GB",
            str(row.num_samplers),
            row.form,
            f"{row.megabytes:.1f}",
            f"{100 * row.share:.2f} %",
            f"{row.seconds:.2f}",
            f"{row.seconds / row.copy_s:.1f}",
            f"{row.first_s:.2f}",
            f"{row.copy_s:.2f}",
            f"{row.pause_s:.3f}",
            f"{row.staged_pause_s:.3f}",
        )
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", nargs="+", type=float, default=[1.0, 4.0])
    parser.add_argument("--samplers", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where to write JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
