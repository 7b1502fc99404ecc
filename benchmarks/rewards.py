"""Throughput of the graders: grades per second of one worker, and the sandbox's overhead.

    python -m benchmarks.rewards [PART ...] [--seconds 5]

Each part grades the same completions repeatedly, one at a time, for `--seconds` of wall time. `humaneval` runs the
reference solutions in the sandbox. `humaneval, no sandbox` runs the same programs and tests by `exec` in this process;
the difference is the cost of the sandbox and the judge. Both need shared/data next to the repository. CPU time includes
all processes of a grade, and is more reliable than wall time on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rewards import Countdown, CountdownConfig, HumanEval, HumanEvalConfig, Problem, Split, Sudoku, SudokuConfig, Task
from rewards.sandbox import Sandbox, SandboxConfig
from rewards.tasks.code_task import program_in

_HUMANEVAL = Path(__file__).parents[2] / "shared" / "data" / "humaneval" / "HumanEval.jsonl.gz"


def _each(task: Task, problems: list[Problem]) -> Iterator[Callable[[], object]]:
    for problem in cycle(problems):
        yield partial(task.grade, problem, problem.reference_completion)


def countdown() -> Iterator[Callable[[], object]]:
    """Grade correct Countdown answers with three numbers."""
    task = Countdown(CountdownConfig())
    return _each(task, task.problems(Split.TRAIN, 200, seed=0))


def sudoku() -> Iterator[Callable[[], object]]:
    """Grade correct Sudoku answers."""
    task = Sudoku(SudokuConfig())
    return _each(task, task.problems(Split.TRAIN, 200, seed=0))


def _humaneval() -> tuple[HumanEval, list[Problem]]:
    task = HumanEval(HumanEvalConfig(train_data=_HUMANEVAL))
    return task, task.problems(Split.TRAIN, 100, seed=0)


def humaneval() -> Iterator[Callable[[], object]]:
    """Grade HumanEval's reference solutions in the sandbox."""
    return _each(*_humaneval())


def humaneval_without() -> Iterator[Callable[[], object]]:
    """Run the same solutions and tests in this process."""
    _, problems = _humaneval()
    for problem in cycle(problems):
        given = problem.metadata
        tests, name = "\n".join(json.loads(given["tests"])), given["entry_point"]
        source = f"{given['setup']}\n{program_in(problem.reference_completion)}\ncandidate = {name}\n{tests}"
        yield partial(_run, source)


def _run(source: str) -> None:
    exec(source, {})


def program() -> Iterator[Callable[[], object]]:
    """Run an empty program in a sandbox."""
    sandbox = Sandbox(SandboxConfig())
    while True:
        yield lambda: sandbox.run("pass")


PARTS = {
    "countdown": countdown,
    "sudoku": sudoku,
    "empty program": program,
    "humaneval, no sandbox": humaneval_without,
    "humaneval": humaneval,
}


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of the children that it has reaped, sandboxes included."""
    return sum(os.times()[:4])


def measured(works: Iterator[Callable[[], object]], seconds: float) -> tuple[list[float], float]:
    """Call works for `seconds`, after one untimed call. Returns each call's wall seconds, and mean CPU seconds."""
    next(works)()
    taken = []
    used = _cpu_s()
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        next(works)()
        taken.append(time.perf_counter() - began)
    return taken, (_cpu_s() - used) / len(taken)


def main() -> None:
    """Print a row for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    table = Table("part", "grades/s", "p50, ms", "p99, ms", "CPU, ms")
    for name in options.parts or PARTS:
        taken, cpu_s = measured(PARTS[name](), options.seconds)
        p99 = statistics.quantiles(taken, n=100)[98]
        row = (len(taken) / sum(taken), statistics.median(taken) * 1e3, p99 * 1e3, cpu_s * 1e3)
        table.add_row(name, *(f"{number:,.3g}" if number < 1000 else f"{number:,.0f}" for number in row))
    Console().print(table)


if __name__ == "__main__":
    main()
