"""Weight sync between machines: seconds and bytes on each link, from one rank to samplers on every machine.

    python -m benchmarks.weights.broadcast [--machines 2 3 4] [--rate 1gbit] [--megabytes 200] [--samplers 4]

The machines are network namespaces (`tests/simulated/machines.py`, needs root), whose links are limited to a rate each
way. The weight store is on the first machine, a learner rank on the second. A version is an adapter, which the store
holds, or the rank's shards, which stay on its machine. The baseline `whole` is an adapter in one piece. Samplers, at
least one on each machine, fetch and verify it at the same time, but do not load it. Seconds are from their start to the
last answer. Bytes are those that each machine sent, with all headers. Forms take turns, after one round that does not
count.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from actors import NAMESPACE
from actors.cluster import watched
from actors.training.run_client import RunClient
from actors.weights.fetching import StoreReader
from actors.weights.store import Manifest, WeightStore
from actors.weights.tensors import make_manifest
from tests.ray_processes import BIN
from tests.simulated.machines import environment_on_machines, machines

_TIMEOUT_S, _PORT, _NUM_TENSORS, _MEGABYTE = 600.0, 6379, 224, 1_000_000
_STORE_BYTES = 2_000_000_000


class WholeStore(WeightStore):
    """Weight store that holds each version in one piece."""

    def publish(self, manifest: Manifest, weights: Mapping[str, NDArray[np.uint8]]) -> None:
        """Take over a version."""
        self._hold(manifest, [ray.put(weights)])


class Rank:
    """Learner rank that only publishes."""

    def __init__(self, store: Any, num_bytes: int) -> None:
        torch.manual_seed(0)
        self._client = RunClient(None, store)
        self._tensors = {f"layer.{index}": torch.randn(num_bytes // 4 // _NUM_TENSORS) for index in range(_NUM_TENSORS)}

    def publish(self, version: int, form: str) -> None:
        """Publish a version to the store."""
        weights: dict[str, Tensor] = {name: tensor + version for name, tensor in self._tensors.items()}
        manifest = make_manifest(version, weights)
        if form != "shards":
            self._client.publish(manifest, weights)
            return
        self._client.offer(str(version), 0, weights)
        assert self._client.take(manifest, str(version), 1), "the store has the offer"
        self._client.withdraw()


class Machine:
    """Counter of the bytes that a machine sends."""

    def sent(self) -> int:
        """Return the bytes sent so far on all links but the loopback."""
        lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]
        counted = (line.split(":") for line in lines)
        return sum(int(fields.split()[8]) for name, fields in counted if name.strip() != "lo")


class Receiver:
    """Sampler that only fetches."""

    def __init__(self, store: Any) -> None:
        self._reader = StoreReader(store, _TIMEOUT_S)

    def ready(self) -> None:
        """Return once the actor has started."""

    def fetch(self, version: int) -> None:
        """Fetch and verify a version."""
        self._reader.version(version)


class Line:
    """A weight store, a rank and samplers on the nodes of the connected cluster."""

    def __init__(self, form: str, nodes: Sequence[str], num_bytes: int, num_samplers: int) -> None:
        def on(index: int) -> dict[str, Any]:
            node = NodeAffinitySchedulingStrategy(nodes[index % len(nodes)], soft=False)
            return {"scheduling_strategy": node, "num_cpus": 0}

        self.form = form
        self._store: Any = watched(WholeStore if form == "whole" else WeightStore).options(**on(0)).remote(1)
        # As in Ray Train, the store can call a rank while the rank's training waits for the store.
        self._rank: Any = ray.remote(Rank).options(max_concurrency=2, **on(1)).remote(self._store, num_bytes)
        receiver: Any = ray.remote(Receiver)
        self._receivers = [receiver.options(**on(index)).remote(self._store) for index in range(num_samplers)]
        ray.get([receiver.ready.remote() for receiver in self._receivers], timeout=_TIMEOUT_S)

    def publish(self, version: int) -> None:
        """Publish a version to the store."""
        ray.get(self._rank.publish.remote(version, self.form), timeout=_TIMEOUT_S)

    def fetch(self, version: int) -> None:
        """Fetch a version in all samplers."""
        ray.get([receiver.fetch.remote(version) for receiver in self._receivers], timeout=_TIMEOUT_S)


def _measure(num_bytes: int, num_samplers: int, num_rounds: int) -> None:
    """Measure on the connected cluster, and print a line of JSON for each form."""
    nodes = [node for _, node in sorted((node["NodeManagerAddress"], node["NodeID"]) for node in ray.nodes())]
    counters: list[Any] = [
        ray.remote(Machine).options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for node in nodes
    ]

    def sent() -> list[int]:
        return list(ray.get([counter.sent.remote() for counter in counters], timeout=_TIMEOUT_S))

    lines = [Line(form, nodes, num_bytes, num_samplers) for form in ("whole", "adapter", "shards")]
    seconds: dict[str, list[float]] = {line.form: [] for line in lines}
    megabytes: dict[str, list[list[int]]] = {line.form: [] for line in lines}
    for version in range(num_rounds + 1):
        for line in lines:
            line.publish(version)
            before, began = sent(), time.perf_counter()
            line.fetch(version)
            seconds[line.form].append(round(time.perf_counter() - began, 2))
            megabytes[line.form].append([(now - one) // _MEGABYTE for one, now in zip(before, sent(), strict=True)])
    for form, measured in seconds.items():
        median = statistics.median(measured[1:])
        found = {"machines": len(nodes), "form": form, "median_s": median, "seconds": measured[1:]}
        print(json.dumps(found | {"megabytes": megabytes[form][1:]}))


def run_on_machines(arguments: argparse.Namespace, num_machines: int) -> str:
    """Start a cluster on machines of namespaces, measure there and return the lines of results."""
    own = ["--on-cluster", "--megabytes", str(arguments.megabytes), "--samplers", str(arguments.samplers)]
    own += ["--rounds", str(arguments.rounds)]
    with tempfile.TemporaryDirectory() as home, machines(*(f"m{index}" for index in range(num_machines))) as made:
        environment = environment_on_machines(Path(home))
        start = [str(BIN / "ray"), "start", f"--object-store-memory={_STORE_BYTES}", "--num-cpus=2"]
        made[0].run([*start, "--head", f"--port={_PORT}", "--include-dashboard=false"], environment, _TIMEOUT_S)
        address = f"{made[0].address}:{_PORT}"
        for machine in made[1:]:
            machine.run([*start, f"--address={address}"], environment, _TIMEOUT_S)
        for machine in made:
            machine.limit(arguments.rate)
        here = [sys.executable, "-m", "benchmarks.weights.broadcast", *own]
        return made[0].run(here, environment | {"RAY_ADDRESS": address}, _TIMEOUT_S)


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rate", default="1gbit", help="of each link, each way, in the terms of tc")
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--samplers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--on-cluster", action="store_true", help="measure on the cluster of RAY_ADDRESS")
    return parser.parse_args(words)


def main() -> None:
    """Measure, and print a line of JSON for each number of machines and form."""
    arguments = parsed()
    if not arguments.on_cluster:
        for num_machines in arguments.machines:
            print(run_on_machines(arguments, num_machines), end="", flush=True)
        return
    ray.init(namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False)
    _measure(arguments.megabytes * _MEGABYTE, arguments.samplers, arguments.rounds)


if __name__ == "__main__":
    main()
