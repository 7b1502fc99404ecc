"""Batch sampling of a file of requests, with answers printed in order as early as possible."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

from rich.console import Console
from rich.text import Text

from deploy.offline.item import AnyCompletion, Batch, Item
from deploy.offline.policy import ReadyPolicy
from deploy.offline.pool import PoolSettings, answer_batches
from deploy.offline.sample.answers import answer, error_answer, stopped_text, work_summary
from deploy.offline.views.canvas import canvas_of, canvas_text
from deploy.offline.worker import WorkerConfig
from deploy.printing import counted, duration, printable, show
from deploy.wait_display import progress_bar
from rollout.request import Completion

Printer = Callable[[Item, AnyCompletion | None], None]
"""Prints the answer to a request; the completion is None for a rejected request."""


def report_rejected(items: Sequence[Item]) -> int:
    """Report the rejected requests on stderr. Returns their number."""
    refused = [item for item in items if item.request is None]
    for item in refused:
        sys.stderr.write(f"d1: {printable(f'{item.place}: {item.error}')}\n")
    sys.stderr.flush()
    return len(refused)


def sample_items(
    policy: ReadyPolicy, items: Sequence[Item], pool: PoolSettings | None = None, *, as_json: bool
) -> bool:
    """Sample all valid requests, here or with a pool of workers, and print the answers in order.

    Returns whether all were completed: after Ctrl-C only the finished answers are printed.
    """
    good = [item for item in items if item.request is not None]
    with _RequestBar(len(good)) as bar:
        printer = partial(_print_json if as_json else _print_text, policy, bar.stdout)
        answers = _OrderedPrinter(items, printer)
        try:
            _generate(policy, good, answers, bar, pool)
        except KeyboardInterrupt:
            is_complete = False
            answers.print_ready(skips_missing=True)
        else:
            is_complete = True
    if not (is_complete and as_json):
        sys.stderr.write(f"{'' if is_complete else 'stopped; '}{bar.summary()}\n")
    return is_complete


def _generate(
    policy: ReadyPolicy, good: Sequence[Item], answers: _OrderedPrinter, bar: _RequestBar, pool: PoolSettings | None
) -> None:
    def done(index: int, completion: AnyCompletion) -> None:
        bar.add(completion)
        answers.add(good[index], completion)

    if pool is None:
        requests: list[Any] = [item.request for item in good]
        policy.sampler.generate(requests, done)
        return
    size = policy.engine.num_slots
    starts = range(0, len(good), size)
    batches = [Batch(index=start, items=tuple(good[start : start + size])) for start in starts]
    config = WorkerConfig(checkpoint=policy.directory, engine=policy.engine)
    for batch in answer_batches(config, pool, batches):
        for index, completion in enumerate(batch.completions, start=batch.index):
            done(index, completion)


class _OrderedPrinter:
    """Buffer that prints answers in request order."""

    def __init__(self, items: Sequence[Item], printer: Printer) -> None:
        self._items, self._printer = deque(items), printer
        self._held: dict[int, AnyCompletion] = {}
        self.print_ready()

    def add(self, item: Item, completion: AnyCompletion) -> None:
        """Add the completion of a request."""
        self._held[id(item)] = completion
        self.print_ready()

    def print_ready(self, *, skips_missing: bool = False) -> None:
        """Print the buffered answers up to the first missing one, or all of them."""
        while self._items:
            item = self._items[0]
            is_ready = item.request is None or id(item) in self._held
            if not is_ready and not skips_missing:
                return
            with _delayed_interrupt():
                self._items.popleft()
                if is_ready:
                    self._printer(item, self._held.pop(id(item), None))


class _RequestBar:
    """Progress bar of the requests, if stderr is a terminal. It stays below answers printed to the same terminal."""

    def __init__(self, num_requests: int) -> None:
        self.stdout = Console()
        self._total, self._num_done = num_requests, 0
        self._num_tokens = self._num_forwards = 0
        self._began = time.monotonic()
        # Two consoles on one terminal would overwrite each other, and piped output must not be redirected.
        console = self.stdout if sys.stdout.isatty() else Console(stderr=True)
        is_shown = num_requests > 0 and sys.stderr.isatty()
        self._progress = progress_bar(console, disable=not is_shown, redirect_stdout=False, redirect_stderr=False)
        self._task = self._progress.add_task("requests", total=self._total, facts="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def add(self, completion: AnyCompletion) -> None:
        """Count a completion and update the bar."""
        self._num_done += 1
        self._num_tokens += completion.num_tokens
        self._num_forwards += completion.num_forwards
        rate = self._num_tokens / (time.monotonic() - self._began)
        self._progress.update(self._task, advance=1, facts=f"{rate:.0f} tokens/s")

    def summary(self) -> str:
        """Return a one-line summary of the work done."""
        share = counted(self._total, "request")
        if self._num_done < self._total:
            share = f"{self._num_done} of {share}"
        took = duration(time.monotonic() - self._began)
        return f"{share}, {work_summary(self._num_tokens, self._num_forwards)}, {took}"


@contextmanager
def _delayed_interrupt() -> Iterator[None]:
    """Delay Ctrl-C so that no answer is printed partially or twice. A second Ctrl-C interrupts at once."""
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _print_json(policy: ReadyPolicy, console: Console, item: Item, completion: AnyCompletion | None) -> None:
    value = error_answer(item) if completion is None else answer(item, completion, policy)
    # json.dumps writes ASCII, so the output contains no terminal control sequences.
    show(Text(json.dumps(value, allow_nan=False)), console)


def _print_text(policy: ReadyPolicy, console: Console, item: Item, completion: AnyCompletion | None) -> None:
    if completion is None:
        return
    name = f" {item.id}" if item.id is not None else ""
    ended = stopped_text(item, completion, policy)
    facts = f"{work_summary(ended.num_tokens, completion.num_forwards)}, {ended.reason}"
    show(Text(printable(f"--- {item.place}{name}: {facts}"), style="dim"), console)
    if policy.tokenizer is None:
        show(Text(" ".join(map(str, completion.token_ids[: ended.num_tokens].tolist()))), console)
    elif console.is_terminal and isinstance(completion, Completion):
        shown = replace(completion, num_tokens=ended.num_tokens)
        show(canvas_text(canvas_of(shown), policy.tokenizer.decode), console)
    else:
        show(Text(printable(ended.text)), console)
