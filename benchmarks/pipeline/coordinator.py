"""Scalability of the coordinator: how many samplers it can keep busy.

    python -m benchmarks.pipeline.coordinator [--samplers 10 100 1000 4000] [--portion-s 1] [--rounds 3] [--out FILE]

A real coordinator runs in this process with its ledger, pools, run log and files. Samplers, graders and learner are
simulated: a sampler answers after `--portion-s`, graders and the learner at once. A round has four work units per
sampler, each of two groups of eight. Ray's overhead is not included (see `benchmarks.pipeline.overlap`).

- dispatch: latency from a free sampler and a pending work unit to the call, 50th and 99th percentile.
- at work: utilisation of the samplers. The rest is the coordinator's overhead.
- CPU a work unit: CPU time of this process, simulation included. Its reciprocal bounds the work units per second.
- memory: growth of the process over the rounds, per 100,000 groups.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
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
from actors.messages import TrainedRound, WeightsId, WorkUnit, WorkUnitSummary
from actors.spec import RunSpec
from benchmarks.pipeline.simulated import NO_REGISTRY, graded, make_run

_PORTIONS_OF_SAMPLER, _GROUPS_OF_PORTION, _GROUP_SIZE = 4, 2, 8
_SECONDS = {"sampling_s": 0.1, "training_s": 0.1, "publish_s": 0.1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Measurements for one number of samplers."""

    num_samplers: int
    round_s: float
    """Median duration of a round."""
    at_work: float
    """Utilisation of the samplers."""
    dispatch_s: tuple[float, float]
    """Median and 99th percentile of the dispatch latency."""
    cpu_of_portion_s: float
    groups_per_s: float
    longest_turn_s: float
    """Longest blocking of the event loop, in CPU seconds of its thread."""
    bytes_of_100_000_groups: float


class Answers:
    """Simulated actor, or one of its remote methods, with Ray's interface."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def options(self, **_: Any) -> Answers:
        """Mimic Ray's method."""
        return self

    def remote(self, *arguments: Any) -> Any:
        """Mimic Ray's method."""
        return self._answer(*arguments)


class Sampler:
    """Simulated sampler with a fixed time per work unit. Records the dispatch latency."""

    def __init__(self, portion_s: float, waits: list[float]) -> None:
        self._portion_s, self._waits = portion_s, waits
        self._free_since: float | None = None
        self.busy_s = 0.0
        self.ready, self.generate, self.prefetch = Answers(_yes), Answers(self._generate), Answers(_nothing)

    def begin_round(self) -> None:
        """Reset the idle clock: idle time before the round is due to the learner."""
        self._free_since = None

    def _generate(self, _: WeightsId, __: WorkUnit) -> tuple[str, asyncio.Future[int]]:
        now = time.perf_counter()
        if self._free_since is not None:
            self._waits.append(now - self._free_since)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(self._portion_s, self._end, answer)
        return "completions", answer

    def _end(self, answer: asyncio.Future[int]) -> None:
        self._free_since = time.perf_counter()
        self.busy_s += self._portion_s
        answer.set_result(1)


class Grader:
    """Simulated grader that answers at once."""

    def __init__(self) -> None:
        self.ready, self.grade = Answers(_yes), Answers(_grade)


async def _yes() -> bool:
    return True


def _nothing(_: WeightsId) -> None:
    return None


def _grade(work_unit: WorkUnit, _: str) -> tuple[str, asyncio.Future[WorkUnitSummary]]:
    answer: asyncio.Future[WorkUnitSummary] = asyncio.get_running_loop().create_future()
    answer.set_result(graded(work_unit, version=1))
    return "scored", answer


class NoGauges:
    """No-op replacement of the gauges, which need Ray."""

    def __init__(self, run: str) -> None:
        """Accept the run's name, as the real gauges do."""

    def show(self, event: Any) -> None:
        """Ignore the event."""


async def measured(num_samplers: int, portion_s: float, num_rounds: int) -> Row:
    """Run rounds with `num_samplers` samplers. The first round is not counted."""
    with tempfile.TemporaryDirectory() as directory:
        spec = _spec(Path(directory), num_samplers, num_rounds + 1)
        waits: list[float] = []
        samplers = [Sampler(portion_s, waits) for _ in range(num_samplers)]
        coordinator = Coordinator(
            spec,
            {f"sampler {index}": sampler for index, sampler in enumerate(samplers)},
            {f"grader {index}": Grader() for index in range(max(1, num_samplers // 10))},
            Grader(),
            registry_url=NO_REGISTRY,
            store_name="none",
            driver="benchmark",
        )
        turns: list[float] = []
        watching = asyncio.create_task(_watch_turns(turns))
        rounds, cpu, memory = [], 0.0, 0
        for index in range(num_rounds + 1):
            if index == 1:
                cpu, memory = time.process_time(), _memory()
                waits.clear()
                turns.clear()
            for sampler in samplers:
                sampler.begin_round()
                sampler.busy_s = 0.0
            began = time.perf_counter()
            await coordinator.next_batch(index, WeightsId(version=index + 1, digest="x"))
            ended = time.perf_counter()
            at_work = sum(sampler.busy_s for sampler in samplers) / ((ended - began) * num_samplers)
            weights_id = WeightsId(version=index + 2, digest="x")
            await coordinator.published(TrainedRound(round=index, weights_id=weights_id, values=_SECONDS), None)
            if index:
                rounds.append((ended - began, at_work))
        watching.cancel()
        num_work_units = num_rounds * spec.work_units_per_round
        num_groups = num_rounds * spec.learner.groups_per_round
        cpu_s = time.process_time() - cpu
        await coordinator.finish()
    cuts = statistics.quantiles(waits, n=100) if len(waits) > 1 else [0.0] * 99
    round_s = statistics.median(seconds for seconds, _ in rounds)
    return Row(
        num_samplers=num_samplers,
        round_s=round_s,
        at_work=statistics.median(share for _, share in rounds),
        dispatch_s=(cuts[49], cuts[98]),
        cpu_of_portion_s=cpu_s / num_work_units,
        groups_per_s=spec.learner.groups_per_round / round_s,
        longest_turn_s=max(turns),
        bytes_of_100_000_groups=(_memory() - memory) / num_groups * 1e5,
    )


async def _watch_turns(turns: list[float]) -> None:
    """Record the CPU seconds of the loop's thread between polls 1 ms apart. CPU time excludes other processes."""
    last = time.thread_time()
    while True:
        await asyncio.sleep(0.001)
        now = time.thread_time()
        turns.append(now - last)
        last = now


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _spec(directory: Path, num_samplers: int, num_rounds: int) -> RunSpec:
    groups = num_samplers * _PORTIONS_OF_SAMPLER * _GROUPS_OF_PORTION
    return make_run(
        directory,
        "name=coordinator",
        "task={name: sudoku, prompt: compact, min_empty: 4, max_empty: 9}",
        f"num_train_problems={max(1000, groups)}",
        f"learner.num_rounds={num_rounds}",
        f"learner.group_size={_GROUP_SIZE}",
        f"learner.groups_per_round={groups}",
        f"rollout.batch_size={_GROUPS_OF_PORTION * _GROUP_SIZE}",
        "rollout.max_prompt_tokens=18",
    )


def main() -> None:
    """Run the benchmark, print a table, and write it to `--out`."""
    args = _arguments()
    with patch("actors.coordination.coordinator.RunGauges", NoGauges):
        rows = [asyncio.run(measured(number, args.portion_s, args.rounds)) for number in args.samplers]
    Console(width=120).print(_table(rows))
    if args.out is not None:
        args.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _table(rows: Sequence[Row]) -> Table:
    table = Table(
        "samplers",
        "a round, s",
        "at work",
        "dispatch, ms",
        "p99",
        "CPU a portion, ms",
        "groups/s",
        "longest turn, ms",
        "MB",
    )
    for row in rows:
        table.add_row(
            f"{row.num_samplers:,}",
            f"{row.round_s:.2f}",
            f"{100 * row.at_work:.1f} %",
            *(f"{1e3 * seconds:.1f}" for seconds in row.dispatch_s),
            f"{1e3 * row.cpu_of_portion_s:.2f}",
            f"{row.groups_per_s:,.0f}",
            f"{1e3 * row.longest_turn_s:.0f}",
            f"{row.bytes_of_100_000_groups / 1e6:.0f}",
        )
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samplers", type=int, nargs="+", default=[10, 100, 1000, 4000])
    parser.add_argument("--portion-s", type=float, default=1.0, help="of a sampler for a portion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
