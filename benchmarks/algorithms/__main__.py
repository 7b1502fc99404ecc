"""Comparison of all algorithms on the tiny tasks, at equal completions and at equal CPU seconds.

    python -m benchmarks.algorithms [--rows NAME ...] [--tasks sudoku countdown] [--seeds 0 1 2] [--docs docs]

Each row of `learner/algorithms.py` trains from the same SFT checkpoint with its own estimator, objective, advantage,
group size and inner updates. All rows use equally many completions per round. `recipe` is the recipe's own method.
`control` continues SFT on the labels instead; it counts labelled completions.

A row's learning rate is the recipe's divided by the square root of its optimizer steps per round. `--rates` are
multiples of that: a row that ends no better than SFT is retried at each further rate, and the best rate counts.

`--tasks smollm2` trains an adapter of SmolLM2-135M on Countdown. It needs the base that docs/results.md describes, and
20 minutes a row.

A run is evaluated when it reaches the common budget of completions, and again at that of CPU seconds. Results are saved
in `--results`, and a second call resumes from them. The default folder has the data of docs/results.md. Runs with
changed recipes (`--set task.shaping=0`) or methods (`--set learner.objective.kl_coef=0.04`) have separate results.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.algorithms.gains import gains
from benchmarks.algorithms.records import Records
from benchmarks.algorithms.report import Budget, markdown, write_columns
from benchmarks.algorithms.trial import CONTROL_ROW, RECIPE_ROW, Trial, begin, start, try_row
from benchmarks.table.marks import write_between_marks
from deploy.recipe.overrides import load_recipe
from learner.algorithms import ALGORITHMS
from learner.config import LearnerConfig

_RESULTS, _OUT = Path(__file__).parent / "results", Path("runs/algorithms")
TASKS = {
    "sudoku": Path("recipes/tiny.yaml"),
    "countdown": Path("recipes/countdown.yaml"),
    "smollm2": Path("recipes/smollm2-countdown-cpu.yaml"),
}
_TINY = ("sudoku", "countdown")
"""Tasks that every row is run on."""
_BUDGETS = dict.fromkeys(_TINY, (5120, 240.0)) | {"smollm2": (1280, 1200.0)}
"""Completions and CPU seconds that every row trains for."""


def main() -> None:
    """Run the missing trials, print the tables, and write them to `--docs`."""
    args = _arguments()
    console = Console(width=180)
    trials = [
        Trial(
            task=task,
            recipe=str(TASKS[task]),
            row=row,
            seed=seed,
            out=str(args.out.resolve()),
            overrides=tuple(args.set),
        )
        for task in args.tasks
        for seed in args.seeds
        for row in args.rows
    ]
    budgets = {task: _budget(task, args) for task in args.tasks}
    records, failed = Records(args.results), []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context, initializer=begin) as pool:
        for rate in args.rates:
            tried = [replace(trial, rate=rate) for trial in trials]
            missing = [trial for trial in tried if records.find(trial) is None]
            # Trials of one task and seed share a checkpoint: make it once, before them.
            bases = {(trial.task, trial.seed): trial for trial in missing}
            for future in [pool.submit(start, trial) for trial in bases.values()]:
                future.result()
            failed += _carry_out(pool, missing, budgets, records, console)
            trials = [trial for trial in tried if (found := records.find(trial)) and not found.has_learned]
    results = list(records.of(args.tasks))
    text = markdown(results, budgets)
    learners: dict[str, LearnerConfig | None] = {
        CONTROL_ROW: None,
        RECIPE_ROW: load_recipe(TASKS[args.tasks[0]], []).learner,
    } | {row: LearnerConfig.model_validate({"algorithm": row, "num_rounds": 1}) for row in ALGORITHMS}
    overview = gains(results, learners, [task for task in args.tasks if task in _TINY] or args.tasks)
    console.print(text, overview, sep="\n", markup=False, highlight=False)
    if args.docs is not None:
        write_between_marks(args.docs / "results.md", "benchmarks.algorithms", text)
        write_between_marks(args.docs / "results.md", "benchmarks.algorithms gains", overview)
        write_columns(args.docs / "algorithms.md", [result for result in results if result.task in _TINY])
    if failed:
        sys.exit("\n".join(failed))


def _budget(task: str, args: argparse.Namespace) -> Budget:
    completions, seconds = _BUDGETS[task]
    return Budget(num_completions=args.completions or completions, cpu_s=args.seconds or seconds, of_round=args.round)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [CONTROL_ROW, RECIPE_ROW, *ALGORITHMS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=_TINY)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0, 0.25], help="multiples of the learning rate")
    parser.add_argument("--completions", type=int, help="that every row trains on (5120, smollm2: 1280)")
    parser.add_argument("--seconds", type=float, help="of CPU that every row trains for (240, smollm2: 1200)")
    parser.add_argument("--round", type=int, default=256, help="completions of a round")
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--out", type=Path, default=_OUT, help="where the SFT checkpoints go")
    parser.add_argument("--results", type=Path, default=_RESULTS)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes to the recipes and rows")
    parser.add_argument("--docs", type=Path, help="the folder whose results.md and algorithms.md to write them into")
    args = parser.parse_args()
    if args.set and (args.results == _RESULTS or args.out == _OUT):
        parser.error(
            "changed recipes have --results and --out of their own: those of the tables are of the recipes as they are"
        )
    return args


def _carry_out(
    pool: Executor, trials: Sequence[Trial], budgets: Mapping[str, Budget], records: Records, console: Console
) -> list[str]:
    """Run trials and save their results. Returns a message for each failed trial."""
    failed: list[str] = []
    waiting = {pool.submit(try_row, trial, budgets[trial.task]): trial for trial in trials}
    for number, done in enumerate(as_completed(waiting), 1):
        trial, error = waiting[done], done.exception()
        name = f"{trial.task} {trial.row} seed {trial.seed} x{trial.rate:g}"
        if error is None:
            records.keep(done.result())
        else:
            failed.append(f"{name} failed: {error}")
        console.print(f"{number}/{len(trials)} {name}: {error or done.result().summary}")
    return failed


if __name__ == "__main__":
    main()
