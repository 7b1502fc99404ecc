"""`d1 eval`, `d1 compare` and `d1 lm-eval`: evaluation of checkpoints."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from deploy.cli.options import RunsDir, numbers_of, words_of
from deploy.errors import EXIT_INTERRUPTED, UserError
from deploy.printing import printable
from deploy.wait_display import wait_display

if TYPE_CHECKING:
    from deploy.offline.evaluation.evaluate import ComputeSettings, PreparedCell, Subject

PASSES_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Arguments after the checkpoint are passed on to lm-evaluation-harness."""
_PACKAGE = "lm_eval"


def evaluate(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT", help="A run by name or path, a checkpoint's path, or a hub id ORG/NAME."
        ),
    ],
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TASK.KEY=VALUE]...", help="Fields of the tasks, as under `task` in a recipe.", show_default=False
        ),
    ] = None,
    *,
    tasks: Annotated[str | None, typer.Option(metavar="A,B", help="Tasks; left out: the run's own.")] = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="128,256", help="Slots of a completion; left out: as the run has.")
    ] = None,
    schedules: Annotated[
        str | None,
        typer.Option(
            metavar="0.5,threshold=0.9",
            help="A share of the slots as steps, or steps=9, threshold=0.9, factor=1, entropy_bound=0.5; "
            "left out: as the run is evaluated, or 0.5.",
        ),
    ] = None,
    block_length: Annotated[int | None, typer.Option(min=1, help="Slots denoised together.")] = None,
    problems: Annotated[
        int | None, typer.Option(min=1, help="Held-out problems of each task; left out: all, or 500 of made ones.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Completions of each problem, for pass@k.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Of the draws; 0, the default, takes the likeliest token.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Keys the draws.")] = 0,
    protocol: Annotated[
        Literal["fixed", "d1"], typer.Option(help="Our rules; or the first d1's prompts, denoising and parsers.")
    ] = "fixed",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where answers are kept; left out: RUNS_DIR/evaluations/NAME.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; left out: one for each GPU, else for each core.")
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Where to compute; left out: GPUs where there are any.")
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the weights.")] = "float32",
    slots: Annotated[
        int | None, typer.Option(min=1, help="Completions that a worker denoises at a time; left out: as the run's.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Evaluate a checkpoint on held-out problems, at each length and schedule; resumes where it was stopped."""
    with wait_display("loading torch"):
        from deploy.offline.evaluation.evaluate import ComputeSettings, default_out, find_subject, prepare
        from deploy.offline.evaluation.options import EvaluationOptions, SampleSettings
        from deploy.offline.pool import PoolSettings
        from deploy.offline.record import take_lock

    options = EvaluationOptions(
        tasks=words_of(tasks),
        lengths=numbers_of("--lengths", lengths, "number of slots", "128,256", least=1),
        schedules=words_of(schedules),
        block_length=block_length,
        num_problems=problems,
        protocol=protocol,
        fields=tuple(fields or ()),
        sampled=SampleSettings(num_samples=samples, temperature=temperature or 0.0, seed=seed),
    )
    compute = ComputeSettings(num_slots=slots, dtype=dtype, pool=PoolSettings(num_workers=workers, device=device))
    with wait_display(f"looking at {checkpoint}") as waiting:
        subject = find_subject(checkpoint, runs_dir, waiting.change)
        place = out or default_out(subject, runs_dir)
    with closing(take_lock(place)):
        warnings: list[str] = []
        with wait_display("making the problems"):
            prepared = prepare(subject, options, compute, place, warnings.append)
        for warning in warnings:
            sys.stderr.write(f"d1: {printable(warning)}\n")
        _answer(subject, prepared, compute)
        _show(subject, prepared, place, as_json=as_json)


def compare(
    first: Annotated[
        str, typer.Argument(metavar="A", help="An evaluation's directory, or a run or checkpoint that is evaluated.")
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    *,
    task: Annotated[str | None, typer.Option(help="Compare on this task alone.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Test whether one of two evaluated checkpoints is better, paired on the same problems."""
    with wait_display("reading the evaluations"):
        from rich.console import Console

        from deploy.offline.evaluation.compare import compare as compare_cells
        from deploy.offline.evaluation.compare import find_evaluation, sentence
        from deploy.offline.views.evaluations import compared_tables

        names = first, second
        cells = find_evaluation(first, runs_dir), find_evaluation(second, runs_dir)
        found = compare_cells(*cells, names, task)
    if as_json:
        typer.echo(json.dumps([asdict(one) | {"is_real": one.is_significant} for one in found]))
        return
    console = Console()
    for table in compared_tables(found, names):
        console.print(table)
    for one in found:
        typer.echo(printable(sentence(one, names)))


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
            help="Sampling fields as of `d1 sample`, draws, slots, dtype.",
        ),
    ] = "",
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Run lm-evaluation-harness on a checkpoint, in this process: `d1 lm-eval tiny/best --tasks gsm8k --limit 100`.

    All other options are those of `lm_eval run`.
    """
    if find_spec(_PACKAGE) is None:
        raise UserError("the package lm-eval is missing; pip install 'd1[lm-eval]'")
    with wait_display("loading lm-evaluation-harness"):
        from lm_eval.__main__ import cli_evaluate

        import deploy.offline.evaluation.harness  # noqa: F401 - it makes the model `d1` known

    given = ",".join(filter(None, (f"checkpoint={checkpoint}", f"runs_dir={runs_dir}", model_args)))
    sys.argv = ["lm_eval", "run", "--model", "d1", "--model_args", given, *context.args]
    cli_evaluate()


def _answer(subject: Subject, prepared: list[PreparedCell], compute: ComputeSettings) -> None:
    from deploy.interrupts import terminated_by_sigterm
    from deploy.offline.evaluation.evaluate import run_missing
    from deploy.offline.views.evaluations import AnswerBar

    with AnswerBar(prepared) as bar, terminated_by_sigterm():
        try:
            run_missing(subject, prepared, compute, bar.advance)
        except KeyboardInterrupt:
            done = bar.num_done
        else:
            return
    sys.stderr.write(f"d1: stopped; {done} answers are kept, and the same command goes on from there\n")
    raise typer.Exit(EXIT_INTERRUPTED)


def _show(subject: Subject, prepared: list[PreparedCell], place: Path, *, as_json: bool) -> None:
    from rich.console import Console

    from deploy.offline.evaluation.evaluate import RESULTS, results, write_results
    from deploy.offline.views.evaluations import tables

    found = results(subject, prepared)
    write_results(found, place)
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console()
    for table in tables(found, console.width):
        console.print(table)
    sys.stderr.write(f"d1: answers and {RESULTS} are in {place}\n")
