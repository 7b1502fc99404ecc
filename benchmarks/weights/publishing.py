"""What a policy version takes from the learner to the samplers, whole and as an adapter, on Ray.

    python -m benchmarks.weights.publishing [--gigabytes 1 4] [--samplers 1 2 4] [--rank 16] [--rounds 3] [--out FILE]

A policy of random float32 weights is published as `d1 train` does it, and loaded in place by every sampler. Seconds are
from the first gather to the last sampler's answer, the median of some rounds, each beside one plain copy of all weights
in memory. What does not fit this machine's memory is left out, with a sentence.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from actors.fetching import PolicyLoader, StoreReader
from actors.messages import Generation
from actors.spec import Phase
from actors.training.publication import Publisher
from actors.training.run_client import RunClient
from actors.weight_store import Manifest, WeightStore
from benchmarks.models import Shape, empty_policy
from deploy import machine
from deploy.ray_session import ray_session
from learner.model.lora_config import LoraConfig
from learner.parallel.ranks import Ranks
from learner.parallel.sharding import ShardedPolicy

_D_MODEL, _VOCABULARY, _TOKENS, _TIMEOUT_S = 2048, 8192, 128, 600.0
# The learner's weights, gathered, put and put again by the store; each sampler's, and the base beside them.
_COPIES, _COPIES_OF_SAMPLER = 5, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One size of policy, number of samplers and form."""

    gigabytes: float
    """Of all weights in float32."""
    num_samplers: int
    form: str
    """`whole` or `adapter`."""
    megabytes: float
    """Of a version, as the learner hands it over."""
    share: float
    """Of the bytes of all weights."""
    seconds: float
    """From the learner to the last sampler, median."""
    first_s: float
    """Of the first version, with which an adapter's base goes."""
    copy_s: float
    """Of a plain copy of all weights in memory, median."""


class Client(RunClient):
    """A learner's, which counts bytes; there is no coordinator, and no service to hear of anything."""

    def __init__(self, store: Any) -> None:
        super().__init__(None, store)
        self.num_bytes = 0

    def publish(self, manifest: Manifest, weights: Mapping[str, Tensor]) -> bool:
        """As `RunClient.publish`."""
        self.num_bytes = sum(tensor.nbytes for tensor in weights.values())
        return super().publish(manifest, weights)

    def announce(self, generation: Generation, phase: Phase, round_index: int) -> None:
        """Nothing is told."""


class Receiver:
    """A sampler that only loads."""

    def __init__(self, shape: Shape, store: Any) -> None:
        torch.set_num_threads(1)
        self._loader = PolicyLoader(empty_policy(shape, _TOKENS), StoreReader(store, _TIMEOUT_S))

    def ready(self) -> None:
        """Answers once it is there."""

    def load(self, generation: Generation) -> None:
        """Make the policy that version."""
        self._loader.load(generation)


class Line:
    """A learner, a store and samplers."""

    def __init__(self, shape: Shape, lora: LoraConfig, num_samplers: int) -> None:
        model = empty_policy(shape, _TOKENS)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        self.policy = ShardedPolicy(model, None, lora=lora)
        store: Any = ray.remote(WeightStore).options(num_cpus=0).remote(1)
        receiver = ray.remote(Receiver).options(num_cpus=0)
        self._receivers: list[Any] = [receiver.remote(shape, store) for _ in range(num_samplers)]
        self._actors = [store, *self._receivers]
        ray.get([one.ready.remote() for one in self._actors], timeout=_TIMEOUT_S)
        self.client = Client(store)
        self._publisher, self._version = Publisher(self.policy, Ranks(), self.client), 0

    def send(self) -> float:
        """Seconds that a version takes to all samplers."""
        self._version += 1
        with torch.no_grad():
            for parameter in self.policy.trained_parameters.values():
                parameter.add_(1e-3)
        began = time.perf_counter()
        self._publisher.publish(self._version, Phase.RL, self._version)
        loads = [receiver.load.remote(self._publisher.newest) for receiver in self._receivers]
        ray.get(loads, timeout=_TIMEOUT_S)
        return time.perf_counter() - began

    def end(self) -> None:
        """Give the memory back."""
        for actor in self._actors:
            ray.kill(actor)


def main() -> None:
    """Measure, print, and write where `--out` says."""
    args = _arguments()
    torch.set_num_threads(1)
    console = Console(width=120)
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
    """Both forms, one after the other: there is not memory for both at once; and a plain copy beside each."""
    shape = _shape(gigabytes)
    for form, lora in (("whole", LoraConfig()), ("adapter", LoraConfig(rank=rank, alpha=rank))):
        line = Line(shape, lora, num_samplers)
        whole = [tensor.detach() for name, tensor in line.policy.module.named_parameters() if "lora" not in name]
        num_bytes = sum(tensor.nbytes for tensor in whole)
        first_s = line.send()
        taken, copies = [], []
        for _ in range(rounds):
            taken.append(line.send())
            copies.append(_copy_s(whole))
        line.end()
        yield Row(
            gigabytes=gigabytes,
            num_samplers=num_samplers,
            form=form,
            megabytes=line.client.num_bytes / 1e6,
            share=line.client.num_bytes / num_bytes,
            seconds=statistics.median(taken),
            first_s=first_s,
            copy_s=statistics.median(copies),
        )


def _copy_s(tensors: Sequence[Tensor]) -> float:
    copies = [torch.ones_like(tensor) for tensor in tensors]  # Its pages are there before the clock starts.
    began = time.perf_counter()
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    return time.perf_counter() - began


def _shape(gigabytes: float) -> Shape:
    """Of about as many bytes in float32."""
    of_layer = 4 * (4 * _D_MODEL**2 + 9 * _D_MODEL**2)
    rest = 4 * 2 * _VOCABULARY * _D_MODEL
    num_layers = max(1, round((gigabytes * 1e9 - rest) / of_layer))
    return Shape(d_model=_D_MODEL, num_layers=num_layers, num_heads=16, vocab_size=_VOCABULARY)


def _table(rows: Sequence[Row]) -> Table:
    table = Table("weights", "samplers", "form", "MB a version", "share", "s", "copies", "first, s", "a copy, s")
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
