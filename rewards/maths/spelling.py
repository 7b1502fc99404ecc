"""Comparison of LaTeX by normalized spelling, without computer algebra."""

from __future__ import annotations

import re

_DISPLAY_FRACTION = re.compile(r"\\[dt]frac(?![a-zA-Z])")
_TIGHT = re.compile(r"\\!\s*")
_TIGHT_COMMA = re.compile(r"(?<=[0-9])\{,\}(?=[0-9])")
_SPACING = re.compile(r"(?<!\\)\\[,;: ]|\\?\$|~|\\(?:left|right|displaystyle|quad|qquad)(?![a-zA-Z])|\s+")
# Space matters between letters or digits (`\pi x`), and after a comma: `1, 234` is two numbers, `1,234` is one.
_SILENT_SPACE = re.compile(r" +(?![\w ])|(?<![\w, ]) +|(?<=,) +(?![0-9]{3}(?![0-9]))")


def same_spelling(a: str, b: str) -> bool:
    """Return whether two expressions differ only in spacing, sizes, dollar signs and a full stop; false for empty ones.

    Takes time linear in their lengths.
    """
    spelling = normalized_latex(a)
    return bool(spelling) and spelling == normalized_latex(b)


def normalized_latex(text: str) -> str:
    """Return the normalized spelling that `same_spelling` compares."""
    text = _TIGHT.sub("", _DISPLAY_FRACTION.sub(r"\\frac", text))
    text = _SILENT_SPACE.sub("", " ".join(_SPACING.sub(" ", text).split())).rstrip(" .")
    return _TIGHT_COMMA.sub(",", text)
