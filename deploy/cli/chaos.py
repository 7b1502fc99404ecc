"""`d1 chaos`: fault injection into a run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from deploy.chaos.faults import Target
from deploy.cli.options import Overrides, RecipePath
from deploy.errors import UserError


def chaos(
    recipe_path: RecipePath,
    overrides: Overrides = None,
    *,
    kills: Annotated[int, typer.Option(min=1, help="Faults to carry out.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Of their schedule: which, when, and to whom.")] = 0,
    only: Annotated[list[Target] | None, typer.Option(help="Only to this role; may be said several times.")] = None,
    reference: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Directory of an undisturbed run of the recipe; left out: made first."),
    ] = None,
    patience_s: Annotated[
        float, typer.Option(min=1, help="Seconds without progress after which a run counts as stuck, and is killed.")
    ] = 180.0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where runs and report go; left out: a new directory in runs_dir."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON; the rest goes to stderr.")] = False,
) -> None:
    """Inject faults into a run's processes, disk, clock and checkpoints (kill, stop, starve), and judge the outcome.

    Exit status 1 if its history differs from that of an undisturbed run, or if anything else happened that must not.
    """
    from rich.console import Console

    from deploy.chaos.report import as_json as json_of
    from deploy.chaos.report import markdown, table
    from deploy.chaos.session import Order, carry_out
    from deploy.recipe.overrides import load_recipe

    runs_dir = load_recipe(recipe_path, overrides or []).runs_dir
    directory = (out or runs_dir / f"chaos-{time.strftime('%Y%m%d-%H%M%S')}-seed-{seed}").resolve()
    if directory.exists():
        raise UserError(f"{directory} is there already; give --out a directory that is not")
    order = Order(
        recipe_path=recipe_path,
        overrides=tuple(overrides or ()),
        kills=kills,
        seed=seed,
        targets=tuple(only or Target),
        reference=reference,
        patience_s=patience_s,
        out=directory,
    )
    console, began = Console(stderr=as_json), time.monotonic()

    def say(what: str) -> None:
        console.print(f"{time.monotonic() - began:8.1f} s  {what}", markup=False, highlight=False, soft_wrap=True)

    verdict = carry_out(order, say)
    found = json.dumps({"seed": seed, **json_of(verdict)}, indent=2) + "\n"
    (directory / "report.json").write_text(found, encoding="utf-8")
    (directory / "report.md").write_text(markdown(verdict), encoding="utf-8")
    if as_json:
        typer.echo(found, nl=False)
    else:
        console.print(table(verdict))
    for kind, sentences in (("skipped", verdict.skipped), ("violation", verdict.violations)):
        for what in sentences:
            console.print(f"{kind}: {what}", markup=False, highlight=False, soft_wrap=True)
    num_done = sum(len(record.blows) for record in verdict.records)
    console.print(
        f"{num_done} of {kills} faults, {len(verdict.violations)} violations; runs and report: {directory}",
        soft_wrap=True,
        highlight=False,
    )
    if verdict.violations:
        raise typer.Exit(1)
