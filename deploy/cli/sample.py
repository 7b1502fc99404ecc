"""`d1 sample`: denoise prompts with one checkpoint."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from deploy.cli.options import RunsDir
from deploy.errors import EXIT_INTERRUPTED, RunFailedError, UserError, reason
from deploy.wait_display import wait_display

if TYPE_CHECKING:
    from deploy.offline.policy import ReadyPolicy
    from deploy.offline.sample.prepare import Options, PlannedCompletion
    from deploy.offline.sample.renoising import ReadyRenoising

_EXIT_BAD_REQUESTS = 2
_DENOISING = "Denoising (left out: as the checkpoint's run was evaluated, else d1's defaults)"
_STDIN = "-"


def _denoising(text: str, metavar: str | None = None) -> Any:
    return typer.Option(help=text, metavar=metavar, rich_help_panel=_DENOISING)


def sample(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT", help="A run by name or path, a checkpoint's path, or a hub id ORG/NAME."
        ),
    ],
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The user's turn of a conversation.")] = None,
    *,
    requests: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="One JSON object a line, see docs/sampling.md; - reads standard input."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each request.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")] = False,
    keep_after_eos: Annotated[
        bool, typer.Option("--keep-after-eos", help="Fill the whole canvas; nothing ends a text.")
    ] = False,
    colour: Annotated[
        Literal["confidence", "step"], typer.Option(help="What a token's colour shows on a terminal.")
    ] = "confidence",
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Where to compute; left out: a GPU where there is one.")
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the weights.")] = "float32",
    slots: Annotated[int, typer.Option(min=1, help="Requests that are denoised at a time.")] = 64,
    runs_dir: RunsDir = Path("runs"),
    gen_length: Annotated[int | None, _denoising("Tokens of the completion.")] = None,
    block_length: Annotated[int | None, _denoising("Tokens denoised together; divides the length.")] = None,
    steps: Annotated[
        int | None, _denoising("Forwards in all; left out with another length: one for two tokens.")
    ] = None,
    steps_per_block: Annotated[int | None, _denoising("Or forwards for each block; with --threshold at most.")] = None,
    temperature: Annotated[float | None, _denoising("Of the draw; 0, the default, takes the likeliest token.")] = None,
    seed: Annotated[int | None, _denoising("Keys the draws; 0 by default.")] = None,
    schedule: Annotated[
        Literal["quota", "threshold", "factor", "entropy_bound", "random", "left_to_right"] | None,
        _denoising("Which slots a step commits."),
    ] = None,
    threshold: Annotated[float | None, _denoising("Commit slots above this probability.")] = None,
    factor: Annotated[float | None, _denoising("Fast-dLLM's factor; larger commits more at once.")] = None,
    entropy_bound: Annotated[float | None, _denoising("In nats; larger commits more at once.")] = None,
    editing_threshold: Annotated[
        float | None, _denoising("Replace tokens of a block where another is more probable than this (LLaDA2.1).")
    ] = None,
    max_post_steps: Annotated[int | None, _denoising("With it: forwards of a full block at most.")] = None,
    drawing: Annotated[
        Literal["select_then_sample", "sample_then_select"] | None,
        _denoising("Which comes first, above temperature 0."),
    ] = None,
    cfg_scale: Annotated[float | None, _denoising("Classifier-free guidance; 0 is none.")] = None,
    top_p: Annotated[float | None, _denoising("Draw from the likeliest tokens with this probability.")] = None,
    top_k: Annotated[int | None, _denoising("Draw from this many tokens; 0 is all.")] = None,
    cache: Annotated[
        Literal["none", "prefix", "dual"] | None, _denoising("Keep keys and values inside a block; approximate.")
    ] = None,
    cache_refresh_steps: Annotated[int | None, _denoising("With a cache: a full forward after so many steps.")] = None,
) -> None:
    """Denoise a prompt, shown live on a terminal, or a file of requests, with one checkpoint.

    If standard output is no terminal, only the text goes there; the number of tokens and the time go to standard error.
    """
    if (prompt is None) == (requests is None):
        raise UserError("give a prompt or --requests FILE, one of them")
    if prompt == "":
        raise UserError("the prompt is empty; a completion needs something to complete")
    given = {
        "seed": seed,
        "gen_length": gen_length,
        "block_length": block_length,
        "steps": steps,
        "steps_per_block": steps_per_block,
        "temperature": temperature,
        "schedule": schedule,
        "threshold": threshold,
        "factor": factor,
        "entropy_bound": entropy_bound,
        "editing_threshold": editing_threshold,
        "max_post_steps": max_post_steps,
        "drawing": drawing,
        "cfg_scale": cfg_scale,
        "top_p": top_p,
        "top_k": top_k,
        "cache": cache,
        "cache_refresh_steps": cache_refresh_steps,
    }
    with wait_display("loading torch"):
        from deploy.offline.policy import choose_device, find_directory, load_ready
        from deploy.offline.sample.prepare import Options, check_options
        from deploy.offline.sample.renoising import check_renoising_options, open_renoising
        from learner.model.renoising.config import is_renoising
        from rollout.config import EngineConfig

    values = {key: value for key, value in given.items() if value is not None}
    options = Options(values=values, keep_after_eos=keep_after_eos)
    check_options(options)
    lines = None if requests is None else _read(requests)
    # A prompt on the command line is addressed to the policy, so it is a user's turn.
    asked: dict[str, Any] = {"prompt": prompt} if raw else {"messages": [{"role": "user", "content": prompt}]}
    place, engine = choose_device(device), EngineConfig(num_slots=slots, dtype=dtype)
    loading = f"loading the policy of {checkpoint}"
    with wait_display(loading) as waiting:
        directory = find_directory(checkpoint, runs_dir, waiting.change)
    if is_renoising(directory):
        check_renoising_options(options.values)
        with wait_display(loading):
            renoising = open_renoising(directory, checkpoint, place, engine.torch_dtype)
        _sample_renoising(renoising, lines, asked, options, as_json=as_json)
        return
    with wait_display(loading) as waiting:
        policy = load_ready(directory, checkpoint, place, engine, waiting.change)
    with _failures_as_sentences(checkpoint):
        if lines is not None:
            _sample_file(policy, lines, options, colour, as_json=as_json)
        else:
            _sample_prompt(policy, asked, options, colour, as_json=as_json)


def _sample_renoising(
    ready: ReadyRenoising,
    lines: list[tuple[int, bytes]] | None,
    request: Mapping[str, Any],
    options: Options,
    *,
    as_json: bool,
) -> None:
    """Sample with a policy that has no mask token."""
    from deploy.offline.sample.renoising import answer_all, parse_requests

    given = [(1, json.dumps(request).encode())] if lines is None else lines
    items = list(parse_requests(ready, given, options.values, keep_after_eos=options.keep_after_eos))
    if lines is None and items[0].request is None:
        raise UserError(items[0].error)
    with _failures_as_sentences(ready.name):
        if answer_all(ready, items, as_json=as_json):
            raise typer.Exit(_EXIT_BAD_REQUESTS)


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
    policy: ReadyPolicy, lines: list[tuple[int, bytes]], options: Options, colour: str, *, as_json: bool
) -> None:
    from deploy.offline.sample.batch import report_rejected
    from deploy.offline.sample.prepare import prepare_file

    items = list(prepare_file(lines, policy, options))
    num_refused = report_rejected(items)
    _sample_items(policy, items, colour, as_json=as_json)
    if num_refused:
        raise typer.Exit(_EXIT_BAD_REQUESTS)


def _sample_prompt(
    policy: ReadyPolicy, request: Mapping[str, Any], options: Options, colour: str, *, as_json: bool
) -> None:
    from deploy.offline.sample.prepare import prepare_prompt
    from deploy.offline.sample.prompt import sample_prompt
    from deploy.offline.views.canvas import Colour

    item = prepare_prompt(request, policy, options)
    if as_json:
        _sample_items(policy, [item], colour, as_json=True)
    elif item.request is not None and not sample_prompt(policy, item.request, Colour(colour)):
        raise typer.Exit(EXIT_INTERRUPTED)


def _sample_items(policy: ReadyPolicy, items: list[PlannedCompletion], colour: str, *, as_json: bool) -> None:
    from deploy.offline.sample.batch import sample_items
    from deploy.offline.views.canvas import Colour

    if not sample_items(policy, items, Colour(colour), as_json=as_json):
        raise typer.Exit(EXIT_INTERRUPTED)
