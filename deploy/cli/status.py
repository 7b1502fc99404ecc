"""`d1 status` and `d1 scale`: the state of a run, and the size of its pools while it runs."""

from __future__ import annotations

import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.options import Json, RunName, RunsDir
from deploy.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from deploy.runs.scale_request import Kind

_EVERY_S = 2.0
# The driver may still handle an earlier request, whose calls have a timeout of a minute.
_ANSWERED_WITHIN_S = 90.0


def status(
    name: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run, by name or path; by default the one with the newest event."),
    ] = None,
    *,
    as_json: Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the state alone, again every 2 s, until Ctrl-C.")
    ] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show a run: stage, round, which actor waits for which, restarts, seconds of each phase, results and completions.

    It is read from the run directory, so it works on any machine that can access that.
    """
    from rich.console import Console

    from deploy.runs.listing import newest_run, read_run
    from deploy.runs.references import find_run
    from deploy.runs.status_view import json_of, results_view, status_view

    if as_json and watch:
        raise UserError("--json and --watch exclude each other; give one of them")
    run_dir = newest_run(runs_dir) if name is None else find_run(name, runs_dir)
    console = Console(highlight=False)
    if watch:
        _watch(run_dir, console)
    elif as_json:
        typer.echo(json_of(read_run(run_dir)))
    else:
        run = read_run(run_dir)
        for part in (status_view(run), *results_view(run)):
            console.print(part)


def scale(
    name: RunName,
    sizes: Annotated[
        list[str], typer.Argument(metavar="POOL=NUMBER", help="samplers=4, graders=2 or engines=3; several at once.")
    ],
    *,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Change the number of samplers, graders or engines of a run while it is active.

    A surplus actor finishes its work unit first. With learner.max_staleness 0, what the run learns does not depend on
    it.
    """
    from deploy.runs.listing import read_run
    from deploy.runs.references import find_run
    from deploy.runs.scale_request import send_request
    from deploy.wait_display import wait_display

    wanted = _sizes(sizes)
    run_dir = find_run(name, runs_dir)
    if not read_run(run_dir).is_running:
        raise UserError(f"the run {run_dir.name} is not running, so it cannot be scaled")
    with wait_display(f"waiting for {run_dir.name} to answer"):
        answer = send_request(run_dir, wanted, _ANSWERED_WITHIN_S)
    if answer.refusal:
        raise UserError(answer.refusal)
    for kind, (before, after) in answer.changes.items():
        typer.echo(f"{kind}: {before} -> {after}" if before != after else f"{kind}: {after} already")
    for note in answer.notes:
        typer.echo(f"note: {note}")


def _sizes(words: list[str]) -> dict[Kind, int]:
    from deploy.runs.scale_request import KINDS, MAX_ACTORS

    sizes: dict[Kind, int] = {}
    for word in words:
        kind, _, number = word.partition("=")
        if kind not in KINDS:
            raise UserError(f"{word}: a run has {', '.join(KINDS)}; write samplers=4")
        if kind in sizes:
            raise UserError(f"{word}: {kind} is given twice; give it once")
        if not re.fullmatch(r"[0-9]{1,9}", number) or not 1 <= int(number) <= MAX_ACTORS:
            raise UserError(f"{word}: {number or 'nothing'} is not a number of {kind} from 1 to {MAX_ACTORS}")
        sizes[kind] = int(number)
    return sizes


def _watch(run_dir: Path, console: Console) -> None:
    from rich.live import Live

    from deploy.runs.listing import read_run
    from deploy.runs.status_view import status_view

    if not sys.stdout.isatty():
        raise UserError("--watch is for a terminal, and this is none; --json prints the same for a program, once")
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live, suppress(KeyboardInterrupt):
        while True:
            live.update(status_view(read_run(run_dir)), refresh=True)
            time.sleep(_EVERY_S)
