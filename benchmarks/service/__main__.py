"""Command line of the service benchmarks:

    python -m benchmarks.service overhead           overhead of Ray Serve's proxy and handles
    python -m benchmarks.service speed              throughput, gain of batching
    python -m benchmarks.service faults             100 swaps and 20 kills under load
    python -m benchmarks.service soak --minutes 60  memory under mixed load

`--out FILE` writes JSON. The exit status is 1 if an answer was lost, memory grew or the overhead is over its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.service import faults, overhead, soak, speed
from benchmarks.service.deployment import Shape, deployed
from benchmarks.service.table import machine, save


def main() -> None:
    """Run the selected benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, (_, kind, num_replicas) in _PARTS.items():
        part = parts.add_parser(name)
        part.add_argument("--out", type=Path)
        part.add_argument("--replicas", type=int, default=num_replicas)
        for column in fields(kind):
            flag = f"--{column.name.replace('_', '-').removeprefix('num-')}"
            part.add_argument(flag, dest=column.name, type=type(column.default), default=column.default)
    options = parser.parse_args()
    measure, kind, _ = _PARTS[options.part]
    plan = kind(**{column.name: getattr(options, column.name) for column in fields(kind)})
    print(machine())
    with (
        tempfile.TemporaryDirectory() as directory,
        deployed(Path(directory) / "bench", Shape(), options.replicas) as service,
    ):
        result, is_good = asyncio.run(measure(service, plan))
    save(options.out, result)
    sys.exit(0 if is_good else 1)


_PARTS: dict[str, tuple[Callable[..., Coroutine[Any, Any, tuple[dict[str, Any], bool]]], type, int]] = {
    "overhead": (overhead.run, overhead.Plan, 1),
    "speed": (speed.run, speed.Plan, 1),
    "faults": (faults.run, faults.Plan, 2),
    "soak": (soak.run, soak.Plan, 2),
}


if __name__ == "__main__":
    main()
