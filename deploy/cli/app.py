"""The `d1` command: its subcommands, its error messages and its exit statuses."""

from __future__ import annotations

import sys

import typer

from deploy.cli import evaluation, export, machine, plan, policy, report, runs, sample, status, submit, tasks, train
from deploy.errors import EXIT_RUN_FAILED, EXIT_USER_ERROR, RunFailedError, UserError
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
        app(prog_name="d1")
    except UserError as error:
        sys.stderr.write(f"d1: {printable(str(error))}\n")
        sys.exit(EXIT_USER_ERROR)
    except RunFailedError as error:
        sys.stderr.write(f"d1: {printable(str(error))}\n")
        sys.exit(EXIT_RUN_FAILED)
