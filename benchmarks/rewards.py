"""How fast completions are graded, by one worker.

    python -m benchmarks.rewards [PART ...] [--seconds 5]

Each part grades the same completions over and over, one after the other, for so many seconds by the clock. `humaneval`
runs the reference solutions in the sandbox and `humaneval, no sandbox` runs the same programs and tests by `exec` in
this process: the difference is what the sandbox and the judge cost. It needs shared/data beside the repository. CPU is
that of all processes of a grade: it says more than the clock where others use the machine.
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
    """Right answers of three numbers."""
    task = Countdown(CountdownConfig())
    return _each(task, task.problems(Split.TRAIN, 200, seed=0))


def sudoku() -> Iterator[Callable[[], object]]:
    """Right answers."""
    task = Sudoku(SudokuConfig())
    return _each(task, task.problems(Split.TRAIN, 200, seed=0))


def _humaneval() -> tuple[HumanEval, list[Problem]]:
    task = HumanEval(HumanEvalConfig(train_data=_HUMANEVAL))
    return task, task.problems(Split.TRAIN, 100, seed=0)


def humaneval() -> Iterator[Callable[[], object]]:
    """Reference solutions with their tests."""
    return _each(*_humaneval())


def humaneval_without() -> Iterator[Callable[[], object]]:
    """The same in this process."""
    _, problems = _humaneval()
    for problem in cycle(problems):
        given = problem.metadata
        tests, name = "\n".join(json.loads(given["tests"])), given["entry_point"]
        source = f"{given['setup']}\n{program_in(problem.reference_completion)}\ncandidate = {name}\n{tests}"
        yield partial(_run, source)


def _run(source: str) -> None:
    exec(source, {})


def program() -> Iterator[Callable[[], object]]:
    """A program that does nothing, in a sandbox."""
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
    """CPU seconds of this process and of all that it waited for: sandboxes too."""
    return sum(os.times()[:4])


def measured(works: Iterator[Callable[[], object]], seconds: float) -> tuple[list[float], float]:
    """Seconds by the clock of each call, for so many seconds after a first that does not count; CPU seconds of one."""
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
