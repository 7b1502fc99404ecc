"""`d1 eval`, `d1 compare` and `d1 lm-eval`: evaluation of checkpoints."""

from __future__ import annotations

import json
import re
import sys
from contextlib import closing
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.options import Checkpoint, Device, DType, Json, Protocol, RunsDir, Workers
from deploy.errors import EXIT_INTERRUPTED, UserError
from deploy.printing import printable
from deploy.wait_display import wait_display

if TYPE_CHECKING:
    from deploy.offline.evaluation.evaluate import ComputeSettings, PreparedCell, Subject
    from deploy.offline.evaluation.options import EvaluationOptions

PASSES_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Arguments after the checkpoint are passed on to lm-evaluation-harness."""
_PACKAGE = "lm_eval"


_Tasks = Annotated[str | None, typer.Option(metavar="A,B", help="Tasks; left out: the run's own.")]
_Lengths = Annotated[
    str | None, typer.Option(metavar="128,256", help="Slots of a completion; left out: as the run has.")
]
_Schedules = Annotated[
    str | None,
    typer.Option(
        metavar="0.5,threshold=0.9",
        help="A share of the slots as steps, or steps=9, threshold=0.9, factor=1, entropy_bound=0.5; "
        "left out: as the run is evaluated, or 0.5.",
    ),
]


def evaluate(
    checkpoint: Checkpoint,
    fields: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TASK.KEY=VALUE]...", help="Fields of the tasks, as under `task` in a recipe."),
    ] = None,
    *,
    tasks: _Tasks = None,
    lengths: _Lengths = None,
    schedules: _Schedules = None,
    block_length: Annotated[int | None, typer.Option(min=1, help="Slots denoised together.")] = None,
    problems: Annotated[
        int | None, typer.Option(min=1, help="Held-out problems of each task; left out: all, or 500 generated ones.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Completions of each problem, for pass@k.")] = 1,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 selects the most probable token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    protocol: Protocol = "fixed",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where answers are kept; left out: RUNS_DIR/evaluations/NAME.")
    ] = None,
    as_json: Json = False,
    workers: Workers = None,
    device: Device = None,
    dtype: DType = "float32",
    slots: Annotated[
        int | None, typer.Option(min=1, help="Completions that a worker denoises at a time; left out: as the run's.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Evaluate a checkpoint on held-out problems, at each length and schedule; resumes where it was stopped."""
    with wait_display("loading torch"):
        from deploy.offline.evaluation.evaluate import ComputeSettings
        from deploy.offline.evaluation.options import EvaluationOptions
        from deploy.offline.pool import PoolSettings

    options = EvaluationOptions(
        tasks=_words(tasks),
        lengths=_lengths(lengths),
        schedules=_words(schedules),
        block_length=block_length,
        num_problems=problems,
        protocol=protocol,
        fields=tuple(fields or ()),
        num_samples=samples,
        temperature=temperature,
        seed=seed,
    )
    compute = ComputeSettings(num_slots=slots, dtype=dtype, pool=PoolSettings(num_workers=workers, device=device))
    _evaluate(checkpoint, options, compute, out, runs_dir, as_json=as_json)


def compare(
    first: Annotated[
        str, typer.Argument(metavar="A", help="An evaluation's directory, or a run or checkpoint that is evaluated.")
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    *,
    task: Annotated[str | None, typer.Option(help="Compare on this task alone.")] = None,
    as_json: Json = False,
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
    checkpoint: Checkpoint,
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


def _words(text: str | None) -> tuple[str, ...] | None:
    """Split the value of an option that takes several words, as in `A,B`."""
    return None if text is None else tuple(word.strip() for word in text.split(","))


def _lengths(text: str | None) -> tuple[int, ...] | None:
    words = _words(text)
    if strays := [word for word in words or () if not re.fullmatch(r"[0-9]{1,9}", word) or int(word) < 1]:
        raise UserError(f"--lengths {text}: {strays[0] or 'nothing'} is no number of slots; write --lengths 128,256")
    return None if words is None else tuple(map(int, words))


def _evaluate(
    checkpoint: str,
    options: EvaluationOptions,
    compute: ComputeSettings,
    out: Path | None,
    runs_dir: Path,
    *,
    as_json: bool,
) -> None:
    from deploy.interrupts import terminated_by_sigterm
    from deploy.offline.evaluation.evaluate import default_out, find_subject, prepare, run_missing
    from deploy.offline.record import take_lock
    from deploy.offline.views.evaluations import AnswerBar

    with wait_display(f"looking at {checkpoint}") as waiting:
        subject = find_subject(checkpoint, runs_dir, waiting.change)
        place = out or default_out(subject, runs_dir)
    with closing(take_lock(place)):
        warnings: list[str] = []
        with wait_display("making the problems"):
            prepared = prepare(subject, options, compute, place, warnings.append)
        for warning in warnings:
            sys.stderr.write(f"d1: {printable(warning)}\n")
        bar = AnswerBar(prepared)
        try:
            with bar, terminated_by_sigterm():
                run_missing(subject, prepared, compute, bar.advance)
        except KeyboardInterrupt as interrupt:
            said = f"stopped; {bar.num_done} answers are kept, and the same command goes on from there"
            sys.stderr.write(f"d1: {said}\n")
            raise typer.Exit(EXIT_INTERRUPTED) from interrupt
        _show(subject, prepared, place, as_json=as_json)


def _show(subject: Subject, prepared: list[PreparedCell], place: Path, *, as_json: bool) -> None:
    from rich.console import Console

    from deploy.offline.evaluation.evaluate import RESULTS, write_results
    from deploy.offline.views.evaluations import tables

    found = write_results(subject, prepared, place)
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console()
    for table in tables(found, console.width):
        console.print(table)
    sys.stderr.write(f"d1: answers and {RESULTS} are in {place}\n")
