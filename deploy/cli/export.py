"""`d1 export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="RUN|CHECKPOINT", help="A checkpoint's or a run's directory, or a hub id.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A directory that is not there yet, or is empty.")],
    *,
    lora: Annotated[
        Literal["merged", "apart"],
        typer.Option(help="An adapter merged into the weights, or alone: a directory that peft loads."),
    ] = "merged",
) -> None:
    """Write a checkpoint as a Hugging Face directory that the model's original code loads.

    Of a run its newest checkpoint that is whole.
    """
    from deploy.export import export_adapter, export_policy

    if lora == "merged":
        directory = export_policy(checkpoint, out)
        typer.echo(f"{out} is the policy of {directory}")
        return
    directory, base = export_adapter(checkpoint, out)
    typer.echo(f"{out} is the adapter of {directory}, on the policy of {base}")
