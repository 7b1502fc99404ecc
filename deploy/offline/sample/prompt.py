"""Sampling of a single prompt, with a live view of the canvas on a terminal."""

from __future__ import annotations

import sys
import time

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text
from torch import Tensor

from deploy.offline.policy import ReadyPolicy
from deploy.offline.sample.answers import work_summary
from deploy.offline.views.canvas import SPECIAL_CHARACTER, CanvasView, canvas_in, canvas_of, canvas_text, legend, window
from deploy.printing import duration, printable, show
from deploy.requests.families import AnyRequest
from learner.model.tokenizer import ChatTokenizer
from rollout.renoising.request import RenoisingRequest
from rollout.renoising.sampler import RenoisingSampler
from rollout.request import Completion, Request
from rollout.sampler import SlotBatch

# Without a minimum frame time, a tiny policy would finish before anything is visible.
_LEAST_FRAME_S = 0.04
_LONGEST_PAUSE_S = 4.0
_STATUS_LINES = 3


def sample_prompt(policy: ReadyPolicy, request: AnyRequest) -> bool:
    """Denoise a prompt and print its text. Returns False after Ctrl-C, which prints the partial canvas.

    A terminal shows the canvas as it is denoised. Otherwise stdout receives the text alone. A summary of the work goes
    to stderr in both cases.
    """
    assert policy.tokenizer is not None, "a prompt of text was encoded"
    console = Console()
    is_watched = sys.stdout.isatty() and not console.is_dumb_terminal
    if isinstance(request, RenoisingRequest) or isinstance(policy.sampler, RenoisingSampler):
        return _sample_renoised(policy, request, console)
    batch = policy.sampler.open([request])
    run = _Run(batch, request, policy.tokenizer)
    try:
        if is_watched:
            with Live(run, console=console, auto_refresh=False, transient=False) as live:
                run.finish(live)
            console.print()
        else:
            run.finish(None)
    except KeyboardInterrupt:
        run.print_partial(console)
        return False
    run.print_result(console, is_watched=is_watched)
    return True


def _sample_renoised(policy: ReadyPolicy, request: AnyRequest, console: Console) -> bool:
    """Denoise a prompt with a policy without a mask token. A terminal shows its steps on stderr."""
    assert isinstance(request, RenoisingRequest), "it was planned for this policy"
    assert isinstance(policy.sampler, RenoisingSampler), "the request is for its family"
    assert policy.tokenizer is not None, "a prompt of text was encoded"
    try:
        done = policy.sampler.complete(request, on_step=_progress if sys.stderr.isatty() else None)
    except KeyboardInterrupt:
        return False
    show(Text(printable(policy.tokenizer.decode(done.token_ids[: done.num_tokens].tolist()))), console)
    sys.stderr.write(f"{work_summary(done.num_tokens, done.num_forwards)}, {done.finish_reason}\n")
    return True


def _progress(canvas: int, step: int, _ids: Tensor, kept_C: Tensor) -> None:
    kept = f"{int(kept_C.sum())} of {len(kept_C)} slots kept"
    sys.stderr.write(f"\rcanvas {canvas + 1}, step {step + 1}: {kept} \x1b[K\r")


class _Run:
    """Step-by-step sampling of a single request."""

    def __init__(self, batch: SlotBatch, request: Request, tokenizer: ChatTokenizer) -> None:
        self._batch, self._request, self._tokenizer = batch, request, tokenizer
        self._completion: Completion | None = None
        self._seconds, self._num_steps = 0.0, 0

    def finish(self, live: Live | None) -> None:
        """Denoise to the end."""
        pause_s = min(_LEAST_FRAME_S, _LONGEST_PAUSE_S / self._request.params.gen_length)
        while self._completion is None:
            began = time.monotonic()
            done = self._batch.step()
            self._seconds += time.monotonic() - began
            self._num_steps += 1
            if done:
                self._completion = done[0][1]
            if live is not None:
                live.refresh()
                time.sleep(max(0.0, pause_s - (time.monotonic() - began)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the canvas around the first masked slot, the legend and the progress."""
        canvas = self._canvas()
        text = canvas_text(canvas, self._tokenizer.decode, special=SPECIAL_CHARACTER)
        yield from window(list(text.wrap(console, options.max_width)), max(1, options.size.height - _STATUS_LINES - 1))
        yield Text()
        yield legend()
        share = f"{canvas.num_committed} of at most {self._request.params.gen_length} tokens"
        yield Text(f"step {self._num_steps}, {share}, {duration(self._seconds)}", style="dim")

    def print_result(self, console: Console, *, is_watched: bool) -> None:
        """Print the text to stdout and a summary of the work to stderr."""
        completion = self._completion
        assert completion is not None, "it was denoised to the end"
        text = Text(printable(self._tokenizer.decode(completion.token_ids[: completion.num_tokens].tolist())))
        if not is_watched and console.is_terminal:
            # Colours are forced, for instance by FORCE_COLOR.
            text = canvas_text(canvas_of(completion), self._tokenizer.decode)
        show(text, console)
        sys.stderr.write(f"{work_summary(completion.num_tokens, completion.num_forwards)}, {duration(self._seconds)}\n")

    def print_partial(self, console: Console) -> None:
        """Print the partial canvas, and where it was stopped."""
        canvas = self._canvas()
        if not console.is_terminal:
            show(canvas_text(canvas, self._tokenizer.decode), console)
        sys.stderr.write(f"stopped after {self._num_steps} steps, {canvas.num_committed} tokens committed\n")

    def _canvas(self) -> CanvasView:
        if self._completion is not None:
            return canvas_of(self._completion)
        if self._num_steps == 0:
            length = self._request.params.gen_length
            return CanvasView(
                token_ids=[0] * length, masked=[True] * length, steps=[-1] * length, probabilities=[0.0] * length
            )
        return canvas_in(self._batch.state)
