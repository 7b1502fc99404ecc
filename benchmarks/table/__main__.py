"""Reproduce the first d1's results table: base, + SFT, + RL and + SFT + RL, at three lengths.

    python -m benchmarks.table --scale smollm2 --out DIR [--tasks countdown] [--minutes 8] [--docs docs/results.md]

It runs `d1 sft`, `d1 train` and `d1 eval`. The same command resumes after Ctrl-C, a crash, or the end of `--minutes`.
Each cell is measured once and saved as a line of DIR/cells.jsonl (`--cells`). DIR/state.txt lists the files that the
missing cells need, for machines without persistent disks. `benchmarks/table/parts.sh` packs them into parts of less
than 60 MB, and unpacks them at the same path.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.table.cells import Measured, add_cell, as_markdown, read_cells
from benchmarks.table.execute import TimeIsUpError, command_of, execute
from benchmarks.table.marks import write_between_marks
from benchmarks.table.plan import Evaluation, Step, Training, plan, remaining, rows
from benchmarks.table.scales import SCALES, Scale
from deploy.errors import EXIT_INTERRUPTED, RunFailedError, UserError
from deploy.interrupts import terminated_by_sigterm
from deploy.program import command

STATE = "state.txt"


def main() -> None:
    """Measure the missing cells. Exits with 0 also if the time runs out first."""
    args = _arguments()
    scale = SCALES[args.scale]
    try:
        steps = _planned(args, scale)
        if args.dry_run:
            for step in remaining(steps, {cell.place for cell in read_cells(args.cells)}):
                print(command(*command_of(step)))
            return
        with terminated_by_sigterm():
            _measure(args, steps)
    except (UserError, RunFailedError) as error:
        sys.exit(_complain(str(error), 2 if isinstance(error, UserError) else 1))
    except KeyboardInterrupt:
        sys.exit(
            _complain("stopped; what is done is kept, and the same command continues from there", EXIT_INTERRUPTED)
        )
    finally:
        if not args.dry_run:
            _report(args, scale)


def _complain(sentence: str, status: int) -> int:
    sys.stderr.write(f"d1: {sentence}\n")
    return status


def _planned(args: argparse.Namespace, scale: Scale) -> list[Step]:
    unknown = [task for task in args.tasks or () if task not in scale.tasks]
    if unknown:
        raise UserError(f"--tasks {unknown[0]}: scale {args.scale} has {', '.join(scale.tasks)}")
    return plan(
        scale,
        args.out,
        tasks=args.tasks or list(scale.tasks),
        seeds=args.seeds or scale.seeds,
        methods=args.methods or list(scale.methods),
        changes=args.set,
    )


def _measure(args: argparse.Namespace, steps: Sequence[Step]) -> None:
    def missing() -> list[Step]:
        return remaining(steps, {cell.place for cell in read_cells(args.cells)})

    def tell(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)

    def keep(cell: Measured) -> None:
        add_cell(args.cells, cell)
        tell(f"{cell.place.task} {cell.place.row} {cell.place.length}: {cell.num_correct} of {cell.num_problems}")

    deadline = time.monotonic() + 60 * args.minutes
    try:
        execute(missing(), args.out, deadline, tell, keep)
    except TimeIsUpError:
        tell(f"the time is over; {sum(isinstance(step, Evaluation) for step in missing())} cells are missing")
    finally:
        _write_state(args.out, args.cells.absolute(), missing())


def _write_state(out: Path, cells: Path, steps: Sequence[Step]) -> None:
    """List the files of `out` that the missing cells need (runs, checkpoints, answers), and the cells file there."""
    places = [step.run_dir if isinstance(step, Training) else step.out for step in steps]
    # The base is an existing checkpoint if no step makes it.
    starts = [Path(step.needs) for step in steps if not (isinstance(step, Training) and step.is_done)]
    places += [start for start in starts if not set(places) & set(start.parents)]
    places.append(cells)
    found = [str(place.relative_to(out)) for place in places if place.exists() and place.is_relative_to(out)]
    (out / STATE).write_text("".join(f"{place}\n" for place in dict.fromkeys([*found, STATE])), encoding="utf-8")


def _report(args: argparse.Namespace, scale: Scale) -> None:
    cells = read_cells(args.cells)
    labels = rows(args.methods or list(scale.methods))
    text = "\n".join(as_markdown(cells, task, of.lengths, labels) for task, of in scale.tasks.items())
    print(text)
    if args.docs is not None:
        write_between_marks(args.docs, f"benchmarks.table {args.scale}", text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=list(SCALES), default="tiny")
    parser.add_argument("--tasks", nargs="+", metavar="NAME", help="left out: all of the scale")
    parser.add_argument(
        "--methods", nargs="+", metavar="NAME", help="of the scale, or any algorithm; left out: the scale's"
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="left out: the scale's")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes to all recipes")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="when to stop; leave a minute to write a checkpoint"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="for runs, answers and logs; left out: runs/table-SCALE"
    )
    parser.add_argument("--cells", type=Path, metavar="FILE", help="the measured cells; left out: DIR/cells.jsonl")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="the page whose table to rewrite")
    parser.add_argument("--dry-run", action="store_true", help="print the commands; start and write nothing")
    args = parser.parse_args()
    args.out = (args.out or Path("runs") / f"table-{args.scale}").absolute()
    args.cells = args.cells or args.out / "cells.jsonl"
    return args


if __name__ == "__main__":
    main()
