"""`d1 plan`: estimate of the GPU memory and time that a recipe needs."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.cli.options import Overrides, RecipePath
from deploy.errors import UserError, user_errors
from deploy.wait_display import wait_display

_MOST_GPUS = 4096


def plan(
    recipe_path: RecipePath,
    overrides: Overrides = None,
    *,
    gpus: Annotated[int, typer.Option(metavar="N", help="How many there are.")],
    gpu: Annotated[str | None, typer.Option(metavar="KIND", help="Which: H100, H200, A100-80G, ...")] = None,
) -> None:
    """Estimate a recipe's needs on GPUs: memory by process, seconds by phase, the best split, and the first limit.

    It needs no GPU and starts nothing. Of a checkpoint only the config is read.
    """
    with wait_display("counting what the recipe takes"):
        from rich.console import Console

        from deploy.capacity.gpus import DEFAULT_KIND, GPU_KINDS
        from deploy.capacity.plan import make_plan
        from deploy.capacity.view import print_plan
        from deploy.recipe.overrides import load_recipe
        from deploy.runs.references import with_resolved_checkpoint

        if not 1 <= gpus <= _MOST_GPUS:
            raise UserError(f"--gpus {gpus} is no number of GPUs from 1 to {_MOST_GPUS}")
        kind = GPU_KINDS.get(gpu or DEFAULT_KIND)
        if kind is None:
            raise UserError(f"--gpu {gpu} is not known here; there are {', '.join(GPU_KINDS)}")
        recipe = with_resolved_checkpoint(load_recipe(recipe_path, ["device=cuda", *(overrides or [])]))
        with user_errors(ValueError, prefix="model.checkpoint: "):
            made = make_plan(recipe, gpus, kind)
    print_plan(made, Console())
    if made.best is None:
        raise typer.Exit(2)
