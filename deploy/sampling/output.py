"""Standard output: text to look at on a terminal, the same text and nothing else anywhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def show(text: Text, console: Console) -> None:
    """Print a text, with a newline, at once. What is piped is not touched: rich would expand its tabs."""
    if console.is_terminal:
        console.print(text, soft_wrap=True)
    else:
        console.file.write(f"{text.plain}\n")
    console.file.flush()
