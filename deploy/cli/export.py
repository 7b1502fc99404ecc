"""`d1 export`: checkpoints as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from deploy.cli.options import Checkpoint, RunsDir
from deploy.errors import UserError
from deploy.wait_display import wait_display


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A directory that is not there yet, or is empty.")],
    *,
    lora: Annotated[
        Literal["merged", "apart"],
        typer.Option(help="An adapter merged into the weights, or alone: a directory that peft loads."),
    ] = "merged",
    half: Annotated[
        bool, typer.Option("--half", help="With --lora apart: the adapter in bfloat16, half as large, and rounded.")
    ] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write a checkpoint as a Hugging Face directory that the model's original code loads.

    Of a run, it takes the newest checkpoint that is intact.
    """
    if half and lora == "merged":
        raise UserError("--half is for an adapter that is written alone; add --lora apart, or leave it out")
    with wait_display(f"exporting {checkpoint}"):
        from deploy.export import export_adapter, export_policy

        if lora == "merged":
            directory, base = export_policy(checkpoint, out, runs_dir), None
        else:
            directory, base = export_adapter(checkpoint, out, runs_dir, is_half=half)
    if base is None:
        typer.echo(f"{out} is the policy of {directory}")
        return
    typer.echo(f"{out} is the adapter of {directory}, on the policy of {base}")
