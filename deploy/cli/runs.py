"""`d1 runs` and `d1 serve`: what is done with runs that exist."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.options import RunName, RunsDir
from deploy.errors import UserError

_RUNS_DIR = Path("runs")

app = typer.Typer(help="Look at runs.", no_args_is_help=True)


@app.command("ls")
def list_all(runs_dir: RunsDir = _RUNS_DIR) -> None:
    """List the runs, the most recent first."""
    from rich.console import Console

    from deploy.runs import list_runs, runs_table

    if not runs_dir.is_dir():
        raise UserError(f"there is no directory {runs_dir}; `d1 train` makes it, or say --runs-dir DIR")
    runs = list_runs(runs_dir)
    if runs:
        Console().print(runs_table(runs))
    else:
        typer.echo(f"no runs in {runs_dir}")


@app.command()
def show(name: RunName, runs_dir: RunsDir = _RUNS_DIR) -> None:
    """Show one run: its recipe, results, curves, checkpoints and newest completions."""
    from rich.console import Console

    from deploy.run_page import print_run
    from deploy.runs import find_run, read_run

    print_run(read_run(find_run(name, runs_dir)), Console())


def serve(
    name: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run, by name or path, or a checkpoint; by default the newest run."),
    ] = None,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    admin_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port to pin, roll back and pause on; else the recipe's, if any."),
    ] = None,
    runs_dir: RunsDir = _RUNS_DIR,
) -> None:
    """Answer HTTP requests: from a run's newest checkpoint, or its newest policy while it trains; or from a checkpoint.

    A checkpoint is given by its directory, or as a hub id. Without a name, it is the run with the newest event.
    """
    from deploy.runs import find_run, newest_to_serve

    if name is None:
        _serve_run(newest_to_serve(runs_dir), host, port, admin_port)
        return
    from learner.model.hub import find_checkpoint, is_hub_id

    is_hub_model = is_hub_id(name) and not (runs_dir / name).is_dir()
    if (Path(name) / "config.json").is_file() or is_hub_model:
        try:
            checkpoint = find_checkpoint(name)
        except ValueError as error:
            raise UserError(str(error)) from error
        from deploy.service import serve_checkpoint

        if admin_port is not None:
            raise UserError("--admin-port is for runs; a checkpoint by itself has no other version to pin")
        serve_checkpoint(checkpoint, host, port)
        return
    _serve_run(find_run(name, runs_dir), host, port, admin_port)


def _serve_run(run_dir: Path, host: str, port: int, admin_port: int | None) -> None:
    from deploy.service import serve_run

    serve_run(run_dir, host, port, admin_port)
