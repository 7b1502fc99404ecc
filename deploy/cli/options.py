"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file; `d1 schema` says what is in it.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes to the recipe: learner.lr=1e-4 rollout.num_samplers=3"),
]
Checkpoint = Annotated[
    str,
    typer.Argument(metavar="RUN|CHECKPOINT", help="A run by name or path, a checkpoint's path, or a hub id ORG/NAME."),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or the path of its directory.")]
RunsDir = Annotated[Path, typer.Option(help="Where the run directories are.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Protocol = Annotated[
    Literal["fixed", "d1"], typer.Option(help="Rules of d1, or prompts, denoising and parsers of the first d1.")
]
DType = Annotated[Literal["float32", "bfloat16"], typer.Option(help="Precision of the weights.")]
Device = Annotated[
    Literal["cpu", "cuda"] | None, typer.Option(help="Where to compute; left out: a GPU if there is one.")
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Workers on Ray. Left out: this process, and of `d1 eval` one for each GPU or core."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the run's newest checkpoint.")]
ResumeOrStart = Annotated[
    bool,
    typer.Option(
        "--resume-or-start", help="Resume the run if it has begun, else start it: for queues that repeat a command."
    ),
]
Serve = Annotated[bool, typer.Option("--serve", help="Answer HTTP requests from the newest policy meanwhile.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show the whole recipe and what it needs; start and write nothing.")
]
