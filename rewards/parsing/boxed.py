r"""Extraction of LaTeX's `\boxed{...}`, the usual mark of a final answer in mathematics."""

from __future__ import annotations

import re
from dataclasses import dataclass

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BETWEEN_ANSWERS = re.compile(r"[\s$]*(?:[,;/|]|\b(?:and|or)\b)[\s$]*(?:(?:and|or)\b[\s$]*)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A box in a text."""

    before: str
    """The text before it."""
    content: str
    """Its content, stripped."""
    after: str
    """The text after it."""


def last_boxed(text: str) -> str | None:
    r"""Return the stripped content of the last closed `\boxed{...}` or `\fbox{...}`; None if there is none.

    Braces nest; an escaped one (`\{`) does not count. Takes time linear in the length of `text`.
    """
    box = last_box(text)
    return None if box is None else box.content


def last_box(text: str) -> Box | None:
    """Return the same box as `last_boxed`, with the text around it."""
    end = len(text)
    for box in reversed(list(_BOX.finditer(text))):
        closing = _closing(text, box.end() - 1, end)
        if closing is not None:
            content = text[box.end() : closing].strip()
            return Box(before=text[: box.start()], content=content, after=text[closing + 1 :])
        # A brace after this unclosed box would close it first: earlier boxes are searched only up to here.
        end = box.start()
    return None


def answer_box(text: str) -> Box | None:
    r"""Return the same as `last_box`; two boxes joined by a word or comma, `\boxed{3} or \boxed{4}`, give `3 or 4`."""
    box = last_box(text)
    earlier = None if box is None else last_box(box.before)
    if box is None or earlier is None or not _BETWEEN_ANSWERS.fullmatch(earlier.after):
        return box
    return Box(before=earlier.before, content=f"{earlier.content} or {box.content}", after=box.after)


def _closing(text: str, opening: int, end: int) -> int | None:
    """Return the position of the brace that closes the one at `opening`, before `end`; None if there is none."""
    depth = 0
    place = opening
    while place < end:
        match text[place]:
            case "\\":
                place += 1
            case "{":
                depth += 1
            case "}":
                depth -= 1
                if depth == 0:
                    return place
        place += 1
    return None
