"""`d1 doctor` and `d1 schema`: checks of this machine, and the recipes' JSON schema."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import typer

from deploy.cli.options import RunsDir
from deploy.wait_display import wait_display


def doctor(runs_dir: RunsDir = Path("runs")) -> None:
    """Check whether this machine is fit for d1. Exit status 1 if a check fails; warnings do not count."""
    checks = {}
    with wait_display("checking this machine") as waiting:
        from rich.console import Console

        from deploy.doctor import CheckOutcome, checks_table, run_checks

        for name, check in run_checks(runs_dir):
            checks[name] = check
            waiting.change(f"checking this machine; last: {name}")
    Console().print(checks_table(checks))
    counts = Counter(check.outcome for check in checks.values())
    typer.echo(
        f"{counts[CheckOutcome.FAILED]} failed, {counts[CheckOutcome.WARNING]} warnings, {counts[CheckOutcome.OK]} ok"
    )
    if counts[CheckOutcome.FAILED]:
        raise typer.Exit(1)


def schema() -> None:
    """Print the recipes' JSON schema.

    An editor that knows the YAML language server checks and completes a recipe whose first line is

    # yaml-language-server: $schema=recipe.schema.json

    with the path or URL of the file that `d1 schema > recipe.schema.json` writes.
    """
    import json

    from deploy.recipe.recipe import recipe_schema

    typer.echo(json.dumps(recipe_schema(), indent=2))
