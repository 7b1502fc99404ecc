"""`d1 sample`: denoise prompts with one checkpoint."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from deploy.cli.options import Checkpoint, Device, DType, Json, RunsDir, Workers
from deploy.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, RunFailedError, UserError
from deploy.wait_display import wait_display

if TYPE_CHECKING:
    from deploy.offline.policy import ReadyPolicy
    from deploy.offline.pool import PoolSettings

_STDIN = "-"


class SampleCommand(TyperCommand):
    """Command whose help ends with the sampling fields, read only when the help is shown."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        from deploy.requests.parameters import SETTINGS

        self.epilog = f"KEY is one of {', '.join(SETTINGS)}. Defaults: those of the run's evaluation, else d1's."
        super().format_help(ctx, formatter)


def sample(
    checkpoint: Checkpoint,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The user's turn of a conversation.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Sampling fields, as in a request: steps=9 threshold=0.9 temperature=0.7 seed=1",
            show_default=False,
        ),
    ] = None,
    *,
    requests: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="One JSON object a line, see docs/sampling.md; - reads standard input."),
    ] = None,
    as_json: Json = False,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")] = False,
    device: Device = None,
    dtype: DType = "float32",
    slots: Annotated[int, typer.Option(min=1, help="Requests that are denoised at a time.")] = 64,
    workers: Workers = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Denoise a prompt, shown live on a terminal, or a file of requests, with one checkpoint.

    If standard output is no terminal, only the text goes there; the number of tokens and the time go to standard error.
    """
    words = settings or []
    if requests is not None and prompt is not None and "=" in prompt:
        words, prompt = [prompt, *words], None
    if (prompt is None) == (requests is None):
        raise UserError("give a prompt or --requests FILE, one of them")
    if prompt is not None and workers is not None:
        raise UserError("--workers is for --requests FILE; a single prompt is denoised in this process")
    if prompt == "":
        raise UserError("the prompt is empty; a completion needs something to complete")
    from deploy.requests.settings import parse_settings

    values = parse_settings(words)
    with wait_display("loading torch"):
        from deploy.offline.policy import open_policy
        from deploy.offline.pool import PoolSettings
        from deploy.offline.sample.prepare import read_lines
        from rollout.config import EngineConfig

    stdin = typer.get_binary_stream("stdin").read() if str(requests) == _STDIN else None
    lines = None if requests is None else read_lines(str(requests), stdin)
    # A prompt on the command line is addressed to the policy, so it is a user's turn.
    asked: dict[str, Any] = {"prompt": prompt} if raw else {"messages": [{"role": "user", "content": prompt}]}
    pool = None if workers is None else PoolSettings(num_workers=workers, device=device)
    engine = EngineConfig(num_slots=slots, dtype=dtype)
    with wait_display(f"loading the policy of {checkpoint}") as waiting:
        policy = open_policy(checkpoint, device if pool is None else "cpu", engine, runs_dir, waiting.change)
        if pool is None:
            policy.load(waiting.change)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _say
            _sample(policy, asked if lines is None else lines, values, pool, as_json=as_json)
    except FloatingPointError as error:
        raise RunFailedError(f"{checkpoint}: {error}") from error


def _sample(
    policy: ReadyPolicy,
    asked: Mapping[str, Any] | list[tuple[int, bytes]],
    settings: Mapping[str, Any],
    pool: PoolSettings | None,
    *,
    as_json: bool,
) -> None:
    """Sample the prompt of the command line, or the lines of a file."""
    from deploy.offline.sample.batch import report_rejected, sample_items
    from deploy.offline.sample.prepare import prepare_file, prepare_prompt
    from deploy.offline.sample.prompt import sample_prompt

    if isinstance(asked, list):
        items = list(prepare_file(asked, policy, settings))
    else:
        items = [prepare_prompt(asked, policy, settings)]
    num_rejected = report_rejected(items)
    if isinstance(asked, list) or as_json or items[0].request is None:
        is_complete = sample_items(policy, items, pool, as_json=as_json)
    else:
        is_complete = sample_prompt(policy, items[0].request)
    if not is_complete or num_rejected:
        raise typer.Exit(EXIT_USER_ERROR if is_complete else EXIT_INTERRUPTED)


def _say(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning without its place in d1's code, which is of no use to a user."""
    sys.stderr.write(f"d1: {message}\n")
