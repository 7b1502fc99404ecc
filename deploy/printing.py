"""Formatting for terminals: escapes untrusted text, shortens numbers."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_KEPT = "\n\t"
_STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(text: str) -> str:
    """Escape what could steer a terminal: control characters, and overrides of the text direction.

    Model output and logs are untrusted text: an escape sequence in them could retitle, clear or spoof a screen.
    """
    return "".join(
        f"\\u{ord(char):04x}" if unicodedata.category(char) in _STEERING and char not in _KEPT else char
        for char in text
    )


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw the values as a line of bars between their minimum and maximum, averaged to at most `width` bars."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [index * len(finite) // count for index in range(count + 1)]
    means = [math.fsum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)


def duration(seconds: float) -> str:
    """Format seconds for people: `0.4 s`, `42 s`, `3 min 05 s`, `2 h 07 min`."""
    whole = round(seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def rough_duration(seconds: float) -> str:
    """Format seconds in the largest unit that fits: `42 s`, `3 min`, `2 h`, `5 d`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: `1 grader`, `2 graders`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def share(part: float, interval: Sequence[float]) -> str:
    """Format a share from 0 to 1 with its interval, in percent: `16.2 (13.4 to 19.3)`."""
    low, high = interval
    return f"{100 * part:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def metric(value: float) -> str:
    """Format a measured number with four significant digits."""
    return f"{value:.4g}"


def gigabytes(num_bytes: float) -> str:
    """Format a size in gigabytes: `1.5 GB`."""
    return f"{num_bytes / 1e9:.1f} GB"


def show(text: Text, console: Console) -> None:
    """Print a text with a newline and flush. Piped text bypasses rich, which would expand tabs."""
    if console.is_terminal:
        console.print(text, soft_wrap=True)
    else:
        console.file.write(f"{text.plain}\n")
    console.file.flush()
