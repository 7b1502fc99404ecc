"""`d1 report`: an HTML report about runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.options import RunsDir
from deploy.errors import UserError, reason
from deploy.wait_display import wait_display

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deploy.report.examples import ReportExample
    from deploy.runs.listing import Run


def report(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs, by name or by path.")],
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The HTML file to write.")] = Path("report.html"),
    examples: Annotated[
        int, typer.Option(min=0, help="Held-out problems to answer before and after the rounds; 0 loads no policy.")
    ] = 4,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write one HTML file about runs: results, curves, completions before and after, recipes and what differs."""
    with wait_display("reading the runs"):
        from deploy.report.report import write_report
        from deploy.runs.listing import read_run
        from deploy.runs.references import find_run

        found = [read_run(find_run(name, runs_dir)) for name in names]
        runs = {run.directory.name: run for run in found}
    if len(runs) < len(found):
        raise UserError(
            f"{' and '.join(names)} name one run twice, or two of one name; a report identifies runs by their names"
        )
    answered = _examples(runs, examples) if examples else {}
    with wait_display("drawing"):
        write_report(runs, answered, out)
    sys.stderr.write(f"d1: {out} has the report\n")


def _examples(runs: Mapping[str, Run], count: int) -> dict[str, Sequence[ReportExample]]:
    with wait_display("answering held-out problems before and after the rounds"):
        from deploy.report.examples import make_examples
        from deploy.runs.checkpoints import read_recipe

        try:
            return {
                name: make_examples(run.directory, read_recipe(run.directory), count)
                for name, run in runs.items()
                if run.history.rounds
            }
        except (ValueError, FloatingPointError) as error:
            raise UserError(f"{error}; --examples 0 leaves them out") from error
        except OSError as error:
            raise UserError(f"cannot read a checkpoint: {reason(error)}; --examples 0 leaves them out") from error
