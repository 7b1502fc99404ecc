"""Benefit of asynchronous sampling (overlap with training), and the overhead of a round.

    python -m benchmarks.pipeline.overlap [--seconds 0 0.3] [--rounds 15] [--repeats 2] [--recipe FILE] [--out FILE]

The simulation uses the real coordinator, pools and client on Ray. Samplers and learner sleep instead of computing, so
two cores are enough. A round at staleness 0 and 1 is compared with the sum of both phases and with the longer phase.

- overhead: duration at staleness 0 minus the sum. Phases of 0 s measure it alone.
- `taken`: share of the possible overlap, (sum - round) / (sum - longer).
- CPU a work unit: CPU time of the coordinator's process per work unit, Ray included.

`--recipe` also runs that recipe by `d1 train`, alternating staleness 0 and 1, and reports seconds per round from the
run log. There, samplers and learner compute and share the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from actors.cluster import watched
from actors.coordination.coordinator import Coordinator
from actors.messages import ScoredWorkUnit, WeightsId, WorkUnit, WorkUnitSummary
from actors.run_log import read_events
from actors.spec import RunSpec
from actors.training.run_client import RunClient
from actors.weights.store import WeightStore
from benchmarks.pipeline.simulated import NO_REGISTRY, graded, make_run
from deploy.ray_session import ray_session

_D1 = str(Path(sys.executable).with_name("d1"))
_NUM_SAMPLERS, _PORTIONS = 2, 4
FIRST = 2
"""Rounds that are not counted, while the pipeline fills."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Measurements of one setting."""

    sampling_s: float
    """Time to sample a round on all samplers."""
    learning_s: float
    staleness: int
    round_s: float
    """Median duration of a round."""
    taken: float | None
    """Share of the possible overlap."""
    cpu_of_portion_s: float
    """CPU seconds of the coordinator's process per work unit."""


class SleepingSampler:
    """Simulated sampler that sleeps for each work unit."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def ready(self) -> int:
        """Mimic a sampler's method."""
        return 0

    def generate(self, weights_id: WeightsId, work_unit: WorkUnit) -> tuple[int, int]:
        """Sleep, then return the version instead of completions."""
        time.sleep(self._seconds)
        return weights_id.version, len(work_unit.requests)


class InstantGrader:
    """Simulated grader for the results of `SleepingSampler`."""

    def ready(self) -> int:
        """Mimic a grader's method."""
        return 0

    def grade(self, work_unit: WorkUnit, version: int) -> tuple[ScoredWorkUnit, WorkUnitSummary]:
        """Grade every second completion as correct."""
        summary = graded(work_unit, version)
        return ScoredWorkUnit(work_unit=work_unit, completions=(), summary=summary), summary


@contextmanager
def simulated_run(spec: RunSpec, sampling_s: float) -> Iterator[RunClient]:
    """Open the learner's client of a simulated run, whose samplers together take `sampling_s` for a round."""
    of_portion = sampling_s * _NUM_SAMPLERS / spec.work_units_per_round
    sampler, grader = watched(SleepingSampler).options(num_cpus=0), watched(InstantGrader).options(num_cpus=0)
    samplers: list[Any] = [sampler.remote(of_portion) for _ in range(_NUM_SAMPLERS)]
    graders: list[Any] = [grader.remote()]
    store: Any = watched(WeightStore).options(num_cpus=0).remote(1)
    coordinator: Any = (
        ray.remote(Coordinator)
        .options(num_cpus=0)
        .remote(
            spec,
            {f"sampler {index}": sampler for index, sampler in enumerate(samplers)},
            {f"grader {index}": grader for index, grader in enumerate(graders)},
            store,
            registry_url=NO_REGISTRY,
            store_name="none",
            driver="benchmark",
        )
    )
    ray.get([actor.ready.remote() for actor in (*samplers, *graders)])
    try:
        yield RunClient(coordinator, store)
    finally:
        for actor in (*samplers, *graders, store, coordinator):
            ray.kill(actor)


def simulated_rounds(spec: RunSpec, sampling_s: float, learning_s: float) -> tuple[list[float], float]:
    """Return the seconds of each counted round, and the coordinator's CPU seconds per work unit."""
    taken, cpu_s = [], 0.0
    with simulated_run(spec, sampling_s) as client:
        for index in range(spec.learner.num_rounds):
            if index == FIRST:
                cpu_s = _cpu_s_of("ray::Coordinator")
            began = time.perf_counter()
            take_round(client, index, learning_s)
            taken.append(time.perf_counter() - began)
        cpu_s = _cpu_s_of("ray::Coordinator") - cpu_s
    return taken[FIRST:], cpu_s / ((spec.learner.num_rounds - FIRST) * spec.work_units_per_round)


def take_round(client: RunClient, index: int, learning_s: float, label: str = "") -> WeightsId:
    """Simulate the learner's part of a round by sleeping. Returns the version that sampled it.

    If there is a `label`, that version is evaluated in the background.
    """
    began, weights_id = time.perf_counter(), _weights_id(index + 1)
    _, work_units = client.next_batch(index, weights_id, label)
    sampled = time.perf_counter()
    time.sleep(learning_s)
    seconds = {"sampling_s": sampled - began, "training_s": learning_s, "publish_s": 0.0}
    client.published(index, _weights_id(index + 2), seconds, work_units)
    return weights_id


def _weights_id(version: int) -> WeightsId:
    return WeightsId(version=version, digest=str(version))


def _cpu_s_of(title: str) -> float:
    """Sum the CPU seconds of this machine's processes whose title starts with `title`."""
    ticks = 0
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (directory / "cmdline").read_bytes().startswith(title.encode()):
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def simulated(
    phases: Sequence[tuple[float, float]], num_rounds: int, repeats: int, tell: Callable[[str], None]
) -> Iterator[Row]:
    """Measure every pair of phases at staleness 0 and 1 in turn. `tell` receives a line for each."""
    taken: dict[tuple[float, float, int], list[float]] = {}
    cpu_s: dict[tuple[float, float, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        specs = {staleness: spec_of(Path(directory), num_rounds, staleness) for staleness in (0, 1)}
        for _ in range(repeats):
            for sampling_s, learning_s in phases:
                for staleness, spec in specs.items():
                    rounds, of_portion = simulated_rounds(spec, sampling_s, learning_s)
                    round_s = statistics.median(rounds)
                    tell(f"{sampling_s:g} s and {learning_s:g} s, staleness {staleness}: {round_s:.3f} s a round")
                    taken.setdefault((sampling_s, learning_s, staleness), []).extend(rounds)
                    cpu_s.setdefault((sampling_s, learning_s, staleness), []).append(of_portion)
    for (sampling_s, learning_s, staleness), rounds in taken.items():
        round_s = statistics.median(rounds)
        possible = min(sampling_s, learning_s)
        yield Row(
            sampling_s=sampling_s,
            learning_s=learning_s,
            staleness=staleness,
            round_s=round_s,
            taken=(sampling_s + learning_s - round_s) / possible if possible and staleness else None,
            cpu_of_portion_s=statistics.median(cpu_s[sampling_s, learning_s, staleness]),
        )


def spec_of(directory: Path, num_rounds: int, staleness: int) -> RunSpec:
    """Make a run of `num_rounds` counted rounds, with four work units per round and four per evaluation."""
    return make_run(
        directory,
        f"name=staleness-{staleness}",
        f"learner.num_rounds={num_rounds + FIRST}",
        f"learner.max_staleness={staleness}",
        "learner.algorithm=tba",
        "learner.group_size=4",
        f"learner.groups_per_round={4 * _PORTIONS}",
        "rollout.batch_size=16",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RealRow:
    """Medians over a recipe's rounds, from its run log."""

    staleness: int
    round_s: float
    waiting_s: float
    training_s: float
    publish_s: float
    beside_s: float
    """Remainder of a round: the log, and the calls between."""


def real(recipe: Path, num_rounds: int, repeats: int) -> Iterator[RealRow]:
    """Run a recipe at staleness 0 and 1 in turn."""
    events: dict[int, list[tuple[float, dict[str, Any]]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as directory:
        for repeat in range(repeats):
            for staleness, rounds in events.items():
                name = f"staleness-{staleness}-{repeat}"
                words = [f"runs_dir={directory}", f"name={name}", f"learner.max_staleness={staleness}"]
                words += [f"learner.num_rounds={num_rounds}", "control.enabled=false"]
                words += ["evaluation.every_rounds=0", "evaluation.num_problems=100", "evaluation.schedules=null"]
                subprocess.run([_D1, "train", str(recipe), *words], check=True, stdout=subprocess.DEVNULL)
                found = [event for event in read_events(Path(directory) / name) if event["event"] == "round"]
                pairs = zip(found[FIRST - 1 :], found[FIRST:], strict=False)
                rounds += [(after["time_s"] - before["time_s"], after) for before, after in pairs]
    for staleness, rounds in events.items():
        parts = {
            name: statistics.median(event[name] for _, event in rounds)
            for name in ("sampling_s", "training_s", "publish_s")
        }
        beside = [seconds - sum(event[name] for name in parts) for seconds, event in rounds]
        yield RealRow(
            staleness=staleness,
            round_s=statistics.median(seconds for seconds, _ in rounds),
            waiting_s=parts["sampling_s"],
            training_s=parts["training_s"],
            publish_s=parts["publish_s"],
            beside_s=statistics.median(beside),
        )


def main() -> None:
    """Run the benchmark, print tables, and write them to `--out`."""
    args = _arguments()
    console = Console(width=120)
    phases = [(sampling_s, learning_s) for sampling_s in args.seconds for learning_s in args.seconds]
    with ray_session(dashboard=False):
        rows = list(simulated(phases, args.rounds, args.repeats, console.print))
    console.print(_table(rows))
    real_rows = [] if args.recipe is None else list(real(args.recipe, args.rounds, args.repeats))
    if real_rows:
        console.print(_real_table(real_rows))
    if args.out is not None:
        found = {"simulated": [asdict(row) for row in rows], "real": [asdict(row) for row in real_rows]}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def _table(rows: Sequence[Row]) -> Table:
    table = Table(
        "sampling, s", "learning, s", "staleness", "a round, s", "sum", "longer", "beside, ms", "taken", "CPU, ms"
    )
    for row in rows:
        both, longer = row.sampling_s + row.learning_s, max(row.sampling_s, row.learning_s)
        table.add_row(
            f"{row.sampling_s:g}",
            f"{row.learning_s:g}",
            str(row.staleness),
            f"{row.round_s:.3f}",
            f"{both:g}",
            f"{longer:g}",
            f"{1e3 * (row.round_s - (longer if row.staleness else both)):.0f}",
            "" if row.taken is None else f"{100 * row.taken:.0f} %",
            f"{1e3 * row.cpu_of_portion_s:.1f}",
        )
    return table


def _real_table(rows: Sequence[RealRow]) -> Table:
    table = Table("staleness", "a round, s", "waiting", "training", "publishing", "beside, ms")
    for row in rows:
        seconds = (row.round_s, row.waiting_s, row.training_s, row.publish_s)
        table.add_row(str(row.staleness), *(f"{value:.3f}" for value in seconds), f"{1e3 * row.beside_s:.0f}")
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.0, 0.3], help="of the two phases")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--recipe", type=Path)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
