"""End-to-end test of d1's commands on one GPU, under Ray: `make test-gpu`, eight minutes.

    python -m benchmarks.gpu.end_to_end [--out DIR] [--stages NAME ...] [--seconds 480] [--rehearse]

Each row is appended to `DIR/test-gpu.md` as soon as it is measured. Each stage has a time limit, and its failure does
not stop the others. Without a GPU the exit status is 2. `--rehearse` runs all stages on the CPU at toy sizes, as a
smoke test.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.end_to_end import large, small
from benchmarks.gpu.end_to_end.table import Table
from benchmarks.gpu.end_to_end.visit import Visit

_REHEARSAL_PATIENCE = 4


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage's function and its time limit."""

    run: Callable[[Visit], None]
    limit_s: float


STAGES: Mapping[str, Stage] = {
    "cpu": Stage(small.on_cpu, 60),
    "shares": Stage(small.with_shares, 45),
    "turns": Stage(small.taking_turns, 45),
    "ahead": Stage(small.ahead, 75),
    "resume": Stage(small.resumed, 30),
    "eval": Stage(small.evaluated, 20),
    "sample": Stage(small.sampled, 20),
    "serve": Stage(small.served, 30),
    "llada-made": Stage(large.made, 40),
    "llada-offload": Stage(large.offloaded, 45),
    "llada": Stage(large.trained, 240),
}
"""Stages in order of execution. Their limits add up to more than the overall limit, because most end early."""


def main() -> None:
    """Run the stages. Exits with 1 if one failed, with 2 if there is no GPU."""
    args = _arguments()
    if not args.rehearse and not torch.cuda.is_available():
        sys.stderr.write(
            "d1: torch sees no GPU on this machine, and test-gpu measures one; --rehearse runs on the CPU\n"
        )
        sys.exit(2)
    out = (args.out / time.strftime("test-gpu-%Y%m%d-%H%M%S")).resolve()
    gpu = "" if args.rehearse else _gpu_name()
    table = Table(args.out / "test-gpu.md", _title(gpu or "rehearsal on the CPU"))
    visit = Visit(device="cpu" if args.rehearse else "cuda", out=out, table=table, gpu=gpu)
    deadline = time.monotonic() + args.seconds
    for name in args.stages:
        carry_out(visit, name, deadline, patience=_REHEARSAL_PATIENCE if args.rehearse else 1)
    sys.exit(table.num_failed > 0)


def carry_out(visit: Visit, name: str, deadline: float, patience: float = 1) -> None:
    """Run one stage. Its failure becomes a row of the table."""
    began, stage = time.monotonic(), STAGES[name]
    visit.stage, visit.ends_at = name, min(deadline, began + patience * stage.limit_s)
    if visit.left_s <= 0:
        visit.table.fail(name, "the visit's time was over before it began")
        return
    try:
        stage.run(visit)
    # Catch everything here, so that the later stages still run.
    except Exception as error:
        visit.table.fail(name, (str(error).strip() or type(error).__name__).splitlines()[-1])
    visit.row("seconds of the stage", f"{time.monotonic() - began:.1f} s")


def _gpu_name() -> str:
    """Query the GPU's name in a child process: a CUDA context here would hold half a gigabyte of GPU memory."""
    ask = "import torch; print(torch.cuda.get_device_name())"
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


def _title(where: str) -> str:
    ray = importlib.metadata.version("ray")
    return f"{time.strftime('%Y-%m-%d %H:%M')}, {where}, torch {torch.__version__}, Ray {ray}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="for the table and the runs")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=480.0, help="that all stages may take")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with toys")
    return parser.parse_args()


if __name__ == "__main__":
    main()
