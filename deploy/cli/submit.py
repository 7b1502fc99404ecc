"""`d1 submit`: a recipe as a job of a Ray cluster."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

import typer

from deploy.cli.options import Overrides, RecipePath, Serve
from deploy.errors import EXIT_INTERRUPTED
from deploy.program import command
from deploy.wait_display import wait_display


def submit(
    recipe_path: RecipePath,
    overrides: Overrides = None,
    *,
    address: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The dashboard, http://HOST:8265; else RAY_ADDRESS, else this machine's."),
    ] = None,
    serve: Serve = False,
    no_follow: Annotated[bool, typer.Option("--no-follow", help="Return once it is submitted.")] = False,
) -> None:
    """Run a recipe as a job of a Ray cluster, and follow its log.

    Submitting the same run again follows its existing job; if that failed or was stopped, the run is resumed.
    """
    with wait_display("reading the recipe"):
        from deploy.job.submit import connect, follow
        from deploy.job.submit import submit as submit_run
        from deploy.recipe.overrides import load_recipe

        recipe = load_recipe(recipe_path, overrides or [])
    with wait_display("connecting to the cluster"):
        client = connect(address)
    job_id = submit_run(client, recipe, recipe_path, overrides or [], serve=serve, say=typer.echo)
    if no_follow:
        return
    try:
        status = follow(client, job_id, partial(typer.echo, nl=False))
    except KeyboardInterrupt as interrupt:
        again = command(*sys.argv[1:])
        typer.echo(f"\nno longer following; the job goes on. To follow: {again}. To end it: ray job stop {job_id}")
        raise typer.Exit(EXIT_INTERRUPTED) from interrupt
    raise typer.Exit(status)
