"""LaTeX that is spelled alike: what needs no computer algebra."""

from __future__ import annotations

import re

_DISPLAY_FRACTION = re.compile(r"\\[dt]frac(?![a-zA-Z])")
_TIGHT = re.compile(r"\\!\s*")
_TIGHT_COMMA = re.compile(r"(?<=[0-9])\{,\}(?=[0-9])")
_SPACING = re.compile(r"(?<!\\)\\[,;: ]|\\?\$|~|\\(?:left|right|displaystyle|quad|qquad)(?![a-zA-Z])|\s+")
# Space says something between letters or digits (`\pi x`), and after a comma: `1, 234` is two numbers, `1,234` is one.
_SILENT_SPACE = re.compile(r" +(?![\w ])|(?<![\w, ]) +|(?<=,) +(?![0-9]{3}(?![0-9]))")


def spelled_alike(a: str, b: str) -> bool:
    """Whether two expressions are the same but for spacing, sizes, dollar signs and a full stop; false for empty ones.

    Takes time linear in their lengths.
    """
    spelling = respelled(a)
    return bool(spelling) and spelling == respelled(b)


def respelled(text: str) -> str:
    """The text in the spelling that those have in common which are spelled alike."""
    text = _TIGHT.sub("", _DISPLAY_FRACTION.sub(r"\\frac", text))
    text = _SILENT_SPACE.sub("", " ".join(_SPACING.sub(" ", text).split())).rstrip(" .")
    return _TIGHT_COMMA.sub(",", text)
