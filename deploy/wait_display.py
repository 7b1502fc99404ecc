"""Progress messages for slow operations: what is waited for, and for how long already."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

EVERY_S = 5.0
"""Interval of progress lines."""


class WaitDisplay:
    """Shows what is waited for: a spinner on a terminal, a line every 5 s elsewhere. One wait at a time."""

    def __init__(self, console: Console, prefix: str) -> None:
        """Print to `console`, each line after `prefix`."""
        self._console, self._prefix = console, prefix
        self._lock = threading.Lock()
        self._what, self._quiet_until = "", 0.0
        self._ended: threading.Event | None = None
        self._spinner: Progress | None = None

    def begin(self, what: str, *, at_once: bool = False, first_after_s: float | None = None) -> None:
        """Begin to wait for `what`, such as `starting Ray`; a wait that is under way ends.

        `at_once` prints a line now; a terminal's spinner starts now in any case. `first_after_s` delays the first line
        beyond 5 s, and a terminal then gets lines, not a spinner, because it has a progress bar.
        """
        self.end()
        self._what = what
        if at_once:
            self._print(what)
        if self._console.is_terminal and first_after_s is None:
            self._spinner = _spinner(self._console, what)
            self._spinner.start()
            return
        self._ended = threading.Event()
        arguments = max(EVERY_S, first_after_s or 0.0), self._ended
        threading.Thread(target=self._repeat, args=arguments, name="d1-waiting", daemon=True).start()

    def change(self, what: str) -> None:
        """Change what is waited for; the elapsed time continues."""
        self._what = what
        if self._spinner is not None:
            self._spinner.update(self._spinner.task_ids[0], description=what)

    def postpone(self) -> None:
        """Print no line for the next 5 s: another one has just said what is waited for."""
        self._quiet_until = time.monotonic() + EVERY_S

    def end(self) -> None:
        """End the wait. Nothing is printed after this; a second call does nothing."""
        with self._lock:
            if self._ended is not None:
                self._ended.set()
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None

    def _repeat(self, first_after_s: float, ended: threading.Event) -> None:
        began, pause_s = time.monotonic(), first_after_s
        while not ended.wait(pause_s):
            with self._lock:
                if not ended.is_set() and time.monotonic() >= self._quiet_until:
                    self._print(f"{self._what}: {time.monotonic() - began:.0f} s")
            pause_s = EVERY_S

    def _print(self, text: str) -> None:
        self._console.print(f"{self._prefix}{text}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def wait_display(what: str, *, at_once: bool = False) -> Iterator[WaitDisplay]:
    """Report on stderr what the block does: now if `at_once` or on a terminal, else once it takes longer than 5 s."""
    from rich.console import Console

    waiting = WaitDisplay(Console(stderr=True), "d1: ")
    waiting.begin(what, at_once=at_once)
    try:
        yield waiting
    finally:
        waiting.end()


def progress_bar(console: Console, **options: Any) -> Progress:
    """Create a bar of counted work, with times, which shows nothing unless `console` is a terminal.

    Its tasks have a field `facts`. `options` are those of `Progress`.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}", style="cyan", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        **{"disable": not console.is_terminal} | options,
    )


def _spinner(console: Console, what: str) -> Progress:
    """Create a spinner line that counts seconds, and disappears at the end."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    # Stdout may be a pipe while stderr is the terminal, so a spinner on stderr must not redirect stdout.
    spinner = Progress(*columns, console=console, transient=True, redirect_stdout=not console.stderr)
    spinner.add_task(what, total=None)
    return spinner
