"""`d1 runs` and `d1 serve`: list and serve existing runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from deploy.cli.options import RunsDir
from deploy.errors import UserError, user_errors
from deploy.program import program
from deploy.wait_display import wait_display

_RUNS_DIR = Path("runs")

app = typer.Typer(help="Look at runs.", no_args_is_help=True)


@app.command("ls")
def list_all(runs_dir: RunsDir = _RUNS_DIR) -> None:
    """List the runs, the most recent first."""
    from rich.console import Console

    from deploy.runs.listing import list_runs, runs_table

    if not runs_dir.is_dir():
        raise UserError(f"there is no directory {runs_dir}; `{program()} train` makes it, or give --runs-dir DIR")
    runs = list_runs(runs_dir)
    if runs:
        console = Console()
        console.print(runs_table(runs, console.width))
    else:
        typer.echo(f"no runs in {runs_dir}")


@app.command()
def fetch(
    url: Annotated[str, typer.Argument(metavar="URL/NAME", help="The run NAME in the `checkpoint_url` of its recipe.")],
    runs_dir: RunsDir = _RUNS_DIR,
) -> None:
    """Download a run from where it is mirrored, such as that of a cluster without a shared disk."""
    with wait_display(f"fetching {url}"):
        from deploy.runs.mirror import fetch_mirrored

        run_dir = fetch_mirrored(url, runs_dir)
    typer.echo(f"run directory: {run_dir}")


def serve(
    name: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run, by name or path, or a checkpoint; by default the newest run."),
    ] = None,
    *,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; by default the recipe's, or 127.0.0.1 for a checkpoint.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port to listen on; by default the recipe's, or 8000 for a checkpoint."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Precision of a checkpoint's weights, by default float32; a run has its recipe's."),
    ] = None,
    runs_dir: RunsDir = _RUNS_DIR,
) -> None:
    """Answer HTTP requests from a run's newest checkpoint, or its newest policy while it trains; or from a checkpoint.

    A checkpoint is a directory or a hub id. Without a name, the run with the newest event is served.
    """
    from deploy.runs.listing import newest_servable_run
    from deploy.runs.references import find, is_run

    with wait_display(f"looking for {name or 'the newest run'}"), user_errors(ValueError):
        found = newest_servable_run(runs_dir) if name is None else find(name, runs_dir)
    if is_run(found) and dtype is not None:
        raise UserError("--dtype is for checkpoints; a run has rollout.engine.dtype of its recipe")
    with wait_display("loading Ray and the service", at_once=True):
        from deploy.service.on_ray.launch import serve_checkpoint, serve_run

    if is_run(found):
        serve_run(found, host, port)
    else:
        serve_checkpoint(found, host, port, dtype or "float32")
