"""The `d1` command: its subcommands, its error messages and its exit statuses."""

from __future__ import annotations

import os
import sys

import typer

from deploy.cli import evaluation, export, machine, plan, policy, report, runs, sample, status, submit, tasks, train
from deploy.errors import EXIT_RUN_FAILED, EXIT_USER_ERROR, RunFailedError, UserError, reason
from deploy.printing import printable

app = typer.Typer(
    name="d1",
    help="Reinforcement learning for diffusion language models, as a service on Ray.",
    no_args_is_help=True,
    add_completion=False,
    # A bug's traceback is for the developer: plain, and without the values of local variables.
    pretty_exceptions_enable=False,
)
app.command()(train.train)
app.command()(train.sft)
app.command()(train.adapt)
app.command()(submit.submit)
app.command(cls=sample.SampleCommand)(sample.sample)
app.command("eval")(evaluation.evaluate)
app.command()(evaluation.compare)
app.command("lm-eval", context_settings=evaluation.PASSES_ON)(evaluation.lm_eval)
app.command()(report.report)
app.command()(export.export)
app.command()(tasks.grade)
app.command()(tasks.tasks)
app.command()(runs.serve)
app.add_typer(runs.app, name="runs")
app.add_typer(policy.app, name="policy")
app.command()(plan.plan)
app.command()(status.status)
app.command()(status.scale)
app.command()(machine.doctor)
app.command()(machine.schema)


def main() -> None:
    """Run the command line. Exceptions other than user errors and failed runs are bugs, shown with a traceback."""
    try:
        if sys.stdout is None:
            raise UserError("standard output is closed; redirect it to a file or to /dev/null")
        try:
            app(prog_name="d1")
        finally:
            # If the error came from unbuffered output, the buffer is empty: only another write fails again.
            _flush_output("\n" if isinstance(sys.exc_info()[1], OSError) else "")
    except (UserError, RunFailedError) as error:
        sys.stderr.write(f"d1: {printable(str(error))}\n")
        sys.exit(EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_RUN_FAILED)


def _flush_output(text: str) -> None:
    """Write a text and flush standard output. If Python's own flush at exit failed, the exit code would be 120."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise UserError(f"standard output takes no more: {reason(error)}") from error
