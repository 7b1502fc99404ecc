"""Long runs: memory, log size and restart time of the coordinator after thousands of rounds.

    python -m benchmarks.pipeline.long_run [--rounds 1000 5000 10000 20000] [--out FILE]

A real coordinator runs in this process with its ledger, pools, run log, files and an embedded registry. A sampler, a
grader and the learner are simulated, and answer at once. A round has one work unit of two groups of two, and an event
with the fields of a real round. Every tenth round ends with a checkpoint event, every hundredth with an evaluation.

After each number of rounds of `--rounds`:

- memory: resident size of this process.
- log: bytes of `metrics.jsonl`, `samples.jsonl`, `solve_rates.jsonl` and the TensorBoard files together.
- round: CPU time of this process for each round since the row before, simulation included.
- restart: CPU time until a new coordinator in a new process, on a copy of the run, has its next round's completions and
  has told the registry of its newest version. Starting Python and importing are not included. Its memory follows.
- status, ls, report: CPU time of `d1 status`, `d1 runs ls` and `d1 report` for the copy, start included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from actors.coordination.coordinator import Coordinator
from actors.messages import TrainedRound, WeightsId
from actors.registry.server import ValkeyServer, free_port
from actors.run_log import METRICS, SAMPLES, SOLVE_RATES, TENSORBOARD
from actors.spec import Phase, RunSpec
from benchmarks.pipeline.coordinator import Grader, NoGauges, Sampler
from benchmarks.pipeline.simulated import make_run
from learner.parallel.progress import Place

_SECONDS = {"sampling_s": 0.1, "training_s": 0.1, "publish_s": 0.1}
_METRICS = (
    *(
        "completions/mean_length",
        "completions/max_length",
        "completions/clipped_ratio",
        "entropy",
        "tokens_per_forward",
    ),
    *("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max", "sampling/adapter_share"),
    *("estimator_variance", "loss", "token_logp", "kl", "ratio_cut", "ratio_mean", "ratio_max", "grad_norm"),
    *("effective_sample_share", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"),
    *("learning_rate", "flop_per_s", "mfu", "peak_memory_bytes", "tokens_per_forward", "num_trained_completions"),
)
_CHECKPOINT_EVERY, _EVALUATE_EVERY = 10, 100
_D1 = "from deploy.cli import main; main()"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Measurements after a number of rounds."""

    num_rounds: int
    memory_bytes: int
    log_bytes: int
    round_cpu_s: float
    """Of each round since the row before."""
    restart_cpu_s: float
    restarted_memory_bytes: int
    status_cpu_s: float
    list_cpu_s: float
    report_cpu_s: float


def coordinator_of(spec: RunSpec, registry_url: str, driver: str = "benchmark") -> Coordinator:
    """Make a coordinator with simulated actors. With the `driver` of an earlier one it is that one's restart."""
    return Coordinator(
        spec,
        {"sampler 0": Sampler(0.0, [])},
        {"grader 0": Grader()},
        Grader(),
        registry_url=registry_url,
        store_name="none",
        driver=driver,
    )


async def advance(coordinator: Coordinator, first: int, end: int) -> None:
    """Play the learner's rank 0 from round `first` to the one before `end`. The last round is reported."""
    for index in range(first, end):
        trained = _trained(index - 1) if index > first else None
        await coordinator.next_batch(index, _weights_id(index), trained)
        place = Place(
            num_marks=index, activity=f"round {index}: training", where="", is_in_collective=False, bound_s=60.0
        )
        await coordinator.heartbeat(0, place, "handle", "node")
        await coordinator.announce(_weights_id(index + 1), Phase.RL, index + 1)
        if (index + 1) % _CHECKPOINT_EVERY == 0 or index == end - 1:
            await coordinator.published(_trained(index), None)
            await coordinator.record("checkpoint", _checkpoint(index))
        if (index + 1) % _EVALUATE_EVERY == 0:
            await coordinator.evaluate(_weights_id(index + 1), "round", index + 1, True)


def _weights_id(round_index: int) -> WeightsId:
    """Return the weights that a round begins with."""
    return WeightsId(version=round_index + 1, digest=f"{round_index + 1:064x}")


def _trained(round_index: int) -> TrainedRound:
    values = _SECONDS | dict.fromkeys(_METRICS, 0.123456789 + round_index)
    return TrainedRound(round=round_index, weights_id=_weights_id(round_index + 1), values=values)


def _checkpoint(round_index: int) -> dict[str, Any]:
    where = {"phase": Phase.RL, "round": round_index + 1, "policy_version": round_index + 2}
    return {"path": f"checkpoints/rl-{round_index + 1:06d}", **where, "seconds": 0.1}


async def measured(spec: RunSpec, registry_url: str, marks: Sequence[int]) -> list[Row]:
    """Run to each number of rounds, and measure there."""
    coordinator, rows, done = coordinator_of(spec, registry_url), list[Row](), 0
    await coordinator.learner_starting("group")
    await coordinator.record("phase", {"phase": Phase.RL, "num_steps": spec.learner.num_rounds})
    for mark in marks:
        began = time.process_time()
        await advance(coordinator, done, mark)
        cpu_s = (time.process_time() - began) / (mark - done)
        memory_bytes = _memory()
        sys.stderr.write(f"{mark:,} rounds: {memory_bytes / 1e6:.0f} MB, {1e3 * cpu_s:.2f} ms of CPU a round\n")
        rows.append(_row(spec, registry_url, mark, memory_bytes, cpu_s))
        done = mark
    await coordinator.finish()
    return rows


def _row(spec: RunSpec, registry_url: str, mark: int, memory_bytes: int, round_cpu_s: float) -> Row:
    with tempfile.TemporaryDirectory() as copies:
        copy = spec.model_copy(update={"run_dir": Path(copies) / spec.name})
        shutil.copytree(spec.run_dir, copy.run_dir, symlinks=True)
        name = spec.name
        commands = (
            ["status", name],
            ["runs", "ls"],
            ["report", name, "--examples", "0", "--out", f"{copies}/report.html"],
        )
        status_s, list_s, report_s = (_command_cpu_s([*command, "--runs-dir", copies]) for command in commands)
        # A new process, as after a death of the coordinator.
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_restart, args=(copy, registry_url, mark, sender))
        process.start()
        restart_cpu_s, restarted_bytes = receiver.recv()
        process.join()
    return Row(
        num_rounds=mark,
        memory_bytes=memory_bytes,
        log_bytes=sum(map(_num_bytes, _log_files(spec.run_dir))),
        round_cpu_s=round_cpu_s,
        restart_cpu_s=restart_cpu_s,
        restarted_memory_bytes=restarted_bytes,
        status_cpu_s=status_s,
        list_cpu_s=list_s,
        report_cpu_s=report_s,
    )


def _restart(spec: RunSpec, registry_url: str, next_round: int, answer: Any) -> None:
    """Measure the restart of a coordinator, in a process of its own."""

    async def restarted() -> Coordinator:
        coordinator = coordinator_of(spec, registry_url)
        await coordinator.next_batch(next_round, _weights_id(next_round), _trained(next_round - 1))
        await coordinator.announce(_weights_id(next_round), Phase.RL, next_round)
        await coordinator.status()
        return coordinator

    with patch("actors.coordination.coordinator.RunGauges", NoGauges):
        began = time.process_time()
        coordinator = asyncio.run(restarted())
        answer.send((time.process_time() - began, _memory()))
        del coordinator


def _command_cpu_s(arguments: Sequence[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", _D1, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _log_files(run_dir: Path) -> list[Path]:
    return [run_dir / METRICS, run_dir / SAMPLES, run_dir / SOLVE_RATES, *(run_dir / TENSORBOARD).iterdir()]


def _num_bytes(path: Path) -> int:
    return path.stat().st_size


def _memory() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def make_long_run(directory: Path, num_rounds: int) -> RunSpec:
    """Make a run of `num_rounds` rounds, each of one work unit."""
    return make_run(
        directory,
        "name=long",
        f"learner.num_rounds={num_rounds + 1}",
        "learner.group_size=2",
        "learner.groups_per_round=2",
        "rollout.num_samplers=1",
        "rollout.batch_size=4",
        "evaluation.num_problems=10",
    )


def main() -> None:
    """Run the benchmark, print a table, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, nargs="+", default=[1000, 5000, 10_000, 20_000])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    server = ValkeyServer(free_port(), secrets.token_urlsafe(16))
    with tempfile.TemporaryDirectory() as directory, patch("actors.coordination.coordinator.RunGauges", NoGauges):
        spec = make_long_run(Path(directory), args.rounds[-1])
        try:
            rows = asyncio.run(measured(spec, server.url, args.rounds))
        finally:
            server.stop()
    Console(width=120).print(_table(rows))
    if args.out is not None:
        args.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def _table(rows: Sequence[Row]) -> Table:
    names = (
        "rounds",
        "memory, MB",
        "log, MB",
        "CPU a round, ms",
        "restart, s",
        "memory then, MB",
        "status, s",
        "ls, s",
    )
    table = Table(*names, "report, s")
    for row in rows:
        table.add_row(
            f"{row.num_rounds:,}",
            f"{row.memory_bytes / 1e6:.0f}",
            f"{row.log_bytes / 1e6:.1f}",
            f"{1e3 * row.round_cpu_s:.2f}",
            f"{row.restart_cpu_s:.2f}",
            f"{row.restarted_memory_bytes / 1e6:.0f}",
            f"{row.status_cpu_s:.2f}",
            f"{row.list_cpu_s:.2f}",
            f"{row.report_cpu_s:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
