"""`d1 lm-eval`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.options import RunsDir
from deploy.errors import UserError
from deploy.waiting import saying

PASSES_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""What follows the checkpoint is lm-evaluation-harness' own."""
_PACKAGE = "lm_eval"


def lm_eval(
    context: typer.Context,
    checkpoint: Annotated[
        str, typer.Argument(metavar="RUN|CHECKPOINT", help="A run by name or path, a checkpoint's path, or a hub id.")
    ],
    *,
    model_args: Annotated[
        str,
        typer.Option(
            "--model_args",
            "-a",
            metavar="KEY=VALUE,...",
            help="length, block_length, steps, threshold, draws, slots, dtype.",
        ),
    ] = "",
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Run lm-evaluation-harness on a checkpoint, in this process: `d1 lm-eval tiny/best --tasks gsm8k --limit 100`.

    All other options are those of `lm_eval run`.
    """
    if find_spec(_PACKAGE) is None:
        raise UserError("the package lm-eval is missing; pip install 'd1[lm-eval]'")
    with saying("loading lm-evaluation-harness"):
        from lm_eval.__main__ import cli_evaluate

        import deploy.evaluation.harness  # noqa: F401 - it makes the model `d1` known

    given = ",".join(filter(None, (f"checkpoint={checkpoint}", f"runs_dir={runs_dir}", model_args)))
    sys.argv = ["lm_eval", "run", "--model", "d1", "--model_args", given, *context.args]
    cli_evaluate()
