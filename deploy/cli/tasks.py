"""`d1 grade` and `d1 tasks`: grading of generations, and the list of tasks."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Annotated, Literal

import typer

from deploy.errors import os_errors
from deploy.wait_display import wait_display

_Fields = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Fields of the task, as under `task` in a recipe.", show_default=False
    ),
]


def grade(
    task: Annotated[str, typer.Argument(metavar="TASK", help="A task's name; `d1 tasks` lists them.")],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Rows with question, generation and ground_truth: JSON lines, JSON, CSV or Parquet."
        ),
    ],
    fields: _Fields = None,
    *,
    protocol: Annotated[
        Literal["fixed", "d1"], typer.Option(help="What counts as correct: our rules, or the first d1's parsers.")
    ] = "fixed",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    failures: Annotated[int, typer.Option(min=0, help="Failures to show, without --json.")] = 3,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the grade of each line here, one JSON object a line.")
    ] = None,
) -> None:
    """Grade the generations in a file, as training and evaluation would."""
    with wait_display(f"loading the task {task}"):
        from rich.console import Console

        from deploy.offline.grading import grade_all, grade_json, read_generations, summary
        from deploy.offline.tasks import CUSTOM_TASK, open_task, task_config
        from deploy.offline.views.grades import failures_view, summary_table
        from rewards import JsonlConfig

        # A task without published parsers has no such field.
        rules = [] if protocol == "fixed" else [f"protocol={protocol}"]
        # Problems of your own come with the file.
        config = task_config(task, [*(fields or []), *rules], {"train_data": file} if task == CUSTOM_TASK else None)
        chosen = open_task(config)
    with wait_display(f"reading {file}"):
        lines = read_generations(chosen, file, config.columns if isinstance(config, JsonlConfig) else None)
    done = count(1)
    with wait_display(f"grading {len(lines)} generations") as waiting:
        graded = grade_all(
            chosen, lines, lambda: waiting.change(f"grading {len(lines)} generations, {next(done)} are done")
        )
    if out is not None:
        with os_errors(f"cannot write the grades to {out}"):
            out.write_text("".join(json.dumps(grade_json(line)) + "\n" for line in graded), encoding="utf-8")
    found = {"task": task, "protocol": protocol} | summary(graded)
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console()
    console.print(summary_table(found))
    for view in failures_view(graded, failures):
        console.print(view)


def tasks(
    task: Annotated[str | None, typer.Argument(metavar="[TASK]", help="Show this one with an example.")] = None,
    fields: _Fields = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the tasks with their sizes and an example, or show one."""
    with wait_display("loading the tasks" if task is None else f"loading the task {task}"):
        from rich.console import Console

        from deploy.offline.tasks import describe_task
        from deploy.offline.views.tasks import task_view, tasks_table
        from rewards.tasks.registry import task_names

        names = task_names() if task is None else (task,)
        found = [describe_task(name, fields or []) for name in names]
    if as_json:
        typer.echo(json.dumps(found if task is None else found[0]))
        return
    Console().print(tasks_table(found) if task is None else task_view(found[0]))
