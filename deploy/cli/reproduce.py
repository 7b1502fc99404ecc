"""`d1 reproduce`."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.options import numbers_of, words_of
from deploy.errors import EXIT_INTERRUPTED, UserError
from deploy.printing import counted, printable
from deploy.program import command
from deploy.waiting import saying

if TYPE_CHECKING:
    from collections.abc import Callable

    from deploy.recipe.recipe import Recipe
    from deploy.reproduce.plan import Step, Training


def reproduce(
    *,
    scale: Annotated[
        str,
        typer.Option(
            help="tiny, for two CPU cores; 8b, LLaDA-8B-Instruct as the first d1 trains it; or a .yaml file of yours."
        ),
    ] = "tiny",
    algorithms: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Rows beside diffu-grpo: any algorithm, or `recipe` for the scale's own."),
    ] = None,
    seeds: Annotated[str | None, typer.Option(metavar="0,1,2", help="Left out: the scale's.")] = None,
    sft_data: Annotated[Path | None, typer.Option(metavar="FILE", help="What 8b's SFT trains on: s1K.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Everything is kept here; left out: runs/reproduction-SCALE.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands and what stands in their way; start nothing.")
    ] = False,
) -> None:
    """Train and evaluate the four rows of the first d1's table; goes on where it was stopped.

    Base, SFT, and the rounds from either, for each task and seed, evaluated at three lengths; written as table.md,
    table.json and curves.png.
    """
    with saying("planning"):
        from deploy.reproduce.plan import plan, rows
        from deploy.reproduce.scale import DEFAULT_ALGORITHM, keep, read_scale

        chosen = read_scale(scale, sft_data)
        names = list(dict.fromkeys([DEFAULT_ALGORITHM, *filter(None, words_of(algorithms) or ())]))
        place = (out or Path("runs") / f"reproduction-{Path(scale).stem}").absolute()
        steps = plan(chosen, place, numbers_of("--seeds", seeds, "seed", "0,1,2", least=0) or chosen.seeds, names)
    if dry_run:
        _print_plan(steps, place)
        return
    from deploy.evaluation.record import take_lock
    from deploy.reproduce.report import write_report

    with closing(take_lock(place, "reproduction")):
        keep(chosen, place)
        report = partial(write_report, chosen, Path(scale).stem, steps, rows(names), place)
        is_whole = _execute(steps, place, report)
        text = report()
    typer.echo(printable(text))
    sys.stderr.write(f"d1: table.md, table.json and curves.png are in {place}\n")
    if not is_whole:
        raise typer.Exit(EXIT_INTERRUPTED)


def _execute(steps: list[Step], place: Path, report: Callable[[], str]) -> bool:
    """Whether it came to the end; after Ctrl-C it did not."""
    from deploy.interrupts import terminated_by_sigterm
    from deploy.reproduce.execute import Progress, execute

    with saying("looking what is done") as waiting, terminated_by_sigterm():

        def show(progress: Progress) -> None:
            waiting.change(f"{progress.place} of {progress.num_steps}, {progress.step.name}: {progress.doing}")

        try:
            execute(steps, place, show, report)
        except KeyboardInterrupt:
            pass
        else:
            return True
    sys.stderr.write("d1: stopped; what is done is kept, and the same command goes on from there\n")
    return False


def _print_plan(steps: list[Step], place: Path) -> None:
    from deploy.capacity.available import cluster_resources
    from deploy.job.preflight import preflight
    from deploy.reproduce.execute import command_of, is_complete
    from deploy.reproduce.plan import Texts, Training

    available = cluster_resources(os.environ.get("RAY_ADDRESS"))
    problems: dict[str, str] = {}
    seen: list[Recipe] = []
    for step in steps:
        done = "  # done" if is_complete(step, place) else ""
        if isinstance(step, Texts):
            typer.echo(f"# {counted(step.count, 'text')} into {step.path}{done}")
            continue
        typer.echo(command(*command_of(step, place)) + done)
        # Once for trainings that differ in what they start from alone: looking at a dataset takes long.
        if isinstance(step, Training) and (recipe := _to_look_at(step)) not in seen:
            seen.append(recipe)
            found = preflight(recipe, available, resume=False, serve=False)
            problems |= {problem: problems.get(problem, step.name) for problem in found}
    for problem, name in problems.items():
        typer.echo(f"problem: {printable(problem)} ({name})")
    if problems:
        raise UserError(f"it cannot run here: {counted(len(problems), 'problem')}, listed above")
    typer.echo("Nothing stands in its way. Nothing was started or written.")


def _to_look_at(step: Training) -> Recipe:
    """A training's recipe without what earlier steps leave for it."""
    recipe, runs = step.recipe, str(step.recipe.runs_dir)
    changes: dict[str, object] = {"name": "looked-at", "sft": recipe.sft.model_copy(update={"data": None})}
    if str(recipe.model.checkpoint).startswith(runs):
        changes["model"] = recipe.model.model_copy(update={"checkpoint": None})
    return recipe.model_copy(update=changes)
