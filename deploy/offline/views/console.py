"""Standard output: styled text on a terminal, the plain text anywhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def show(text: Text, console: Console) -> None:
    """Print a text with a newline and flush. Piped text bypasses rich, which would expand tabs."""
    if console.is_terminal:
        console.print(text, soft_wrap=True)
    else:
        console.file.write(f"{text.plain}\n")
    console.file.flush()
