"""Entry point of one GPU stage: `python -m benchmarks.gpu.stages NAME` prints each row as JSON."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from benchmarks.gpu.ceilings import ceilings
from benchmarks.gpu.learning import learner, publishing
from benchmarks.gpu.sampling import precision, sampler
from benchmarks.gpu.serving import engine
from benchmarks.gpu.setting import Row, Setting, full, tiny


@dataclass(frozen=True, slots=True)
class Stage:
    """A measurement and its time limit."""

    rows: Callable[[Setting], Iterator[Row]]
    limit_s: float


def gpu_tests(_: Setting) -> Iterator[Row]:
    """Run `tests/test_gpu.py` and report its outcome."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_gpu.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = (done.stdout.strip() or done.stderr.strip() or "it said nothing").splitlines()[-1]
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    if not counts:
        raise RuntimeError(f"pytest says: {last}")
    yield {"what": "tests of the GPU", **counts}


STAGES: Mapping[str, Stage] = {
    "ceilings": Stage(ceilings, 30),
    "gpu_tests": Stage(gpu_tests, 150),
    "precision": Stage(precision, 85),
    "sampler": Stage(sampler, 120),
    "learner": Stage(learner, 145),
    "publishing": Stage(publishing, 25),
    "engine": Stage(engine, 45),
}
"""Stages in order of execution, each with its time limit in seconds."""


def main() -> None:
    """Run one stage and print its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    for row in STAGES[args.stage].rows((tiny if args.tiny else full)(args.device)):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
