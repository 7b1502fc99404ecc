"""`d1 sample`: denoise prompts with one checkpoint."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from deploy.cli.options import RunsDir
from deploy.errors import EXIT_INTERRUPTED, RunFailedError, UserError, reason
from deploy.wait_display import wait_display

if TYPE_CHECKING:
    from deploy.offline.item import Item
    from deploy.offline.policy import ReadyPolicy
    from deploy.offline.pool import PoolSettings

_EXIT_BAD_REQUESTS = 2
_STDIN = "-"


class SampleCommand(TyperCommand):
    """Command whose help ends with the sampling fields, read only when the help is shown."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        from deploy.requests.parameters import SETTINGS

        self.epilog = (
            f"KEY is one of {', '.join(SETTINGS)}. Left out: as the checkpoint's run was evaluated, else d1's."
        )
        super().format_help(ctx, formatter)


def sample(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT", help="A run by name or path, a checkpoint's path, or a hub id ORG/NAME."
        ),
    ],
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each request.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")] = False,
    colour: Annotated[
        Literal["confidence", "step"], typer.Option(help="What a token's colour shows on a terminal.")
    ] = "confidence",
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Where to compute; left out: a GPU where there is one.")
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the weights.")] = "float32",
    slots: Annotated[int, typer.Option(min=1, help="Requests that are denoised at a time.")] = 64,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Workers of a file, on Ray as of `d1 eval`; left out: this process."),
    ] = None,
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
        from deploy.offline.policy import choose_device, find_directory, read_policy
        from deploy.offline.pool import PoolSettings
        from rollout.config import EngineConfig

    lines = None if requests is None else _read(requests)
    # A prompt on the command line is addressed to the policy, so it is a user's turn.
    asked: dict[str, Any] = {"prompt": prompt} if raw else {"messages": [{"role": "user", "content": prompt}]}
    pool = None if workers is None else PoolSettings(num_workers=workers, device=device)
    place = choose_device(device) if pool is None else "cpu"
    with wait_display(f"loading the policy of {checkpoint}") as waiting:
        directory = find_directory(checkpoint, runs_dir, waiting.change)
        policy = read_policy(directory, checkpoint, place, EngineConfig(num_slots=slots, dtype=dtype))
        if pool is None:
            policy.load(waiting.change)
    with _failures_as_sentences(checkpoint):
        if lines is not None:
            _sample_file(policy, lines, values, colour, pool, as_json=as_json)
        else:
            _sample_prompt(policy, asked, values, colour, as_json=as_json)


@contextmanager
def _failures_as_sentences(checkpoint: str) -> Iterator[None]:
    """Report failures that the request did not cause in one sentence: bad weights, and an output that cannot be
    written."""
    if sys.stdout is None:
        raise UserError("standard output is closed; there is nowhere to write the answer")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _say
            yield
    except FloatingPointError as error:
        raise RunFailedError(f"{checkpoint}: {error}") from error
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"standard output takes no more: {reason(error)}") from error


def _say(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning without its place in d1's code, which is of no use to a user."""
    sys.stderr.write(f"d1: {message}\n")


def _read(requests: Path) -> list[tuple[int, bytes]]:
    from deploy.offline.sample.prepare import read_lines

    is_stdin = str(requests) == _STDIN
    return read_lines(str(requests), typer.get_binary_stream("stdin").read() if is_stdin else None)


def _sample_file(
    policy: ReadyPolicy,
    lines: list[tuple[int, bytes]],
    settings: Mapping[str, Any],
    colour: str,
    pool: PoolSettings | None,
    *,
    as_json: bool,
) -> None:
    from deploy.offline.sample.batch import report_rejected
    from deploy.offline.sample.prepare import prepare_file

    items = list(prepare_file(lines, policy, settings))
    num_refused = report_rejected(items)
    _sample_items(policy, items, colour, pool, as_json=as_json)
    if num_refused:
        raise typer.Exit(_EXIT_BAD_REQUESTS)


def _sample_prompt(
    policy: ReadyPolicy, request: Mapping[str, Any], settings: Mapping[str, Any], colour: str, *, as_json: bool
) -> None:
    from deploy.offline.sample.prepare import prepare_prompt
    from deploy.offline.sample.prompt import sample_prompt
    from deploy.offline.views.canvas import Colour

    item = prepare_prompt(request, policy, settings)
    if as_json:
        _sample_items(policy, [item], colour, as_json=True)
    elif item.request is not None and not sample_prompt(policy, item.request, Colour(colour)):
        raise typer.Exit(EXIT_INTERRUPTED)


def _sample_items(
    policy: ReadyPolicy, items: list[Item], colour: str, pool: PoolSettings | None = None, *, as_json: bool
) -> None:
    from deploy.offline.sample.batch import sample_items
    from deploy.offline.views.canvas import Colour

    if not sample_items(policy, items, Colour(colour), pool, as_json=as_json):
        raise typer.Exit(EXIT_INTERRUPTED)
