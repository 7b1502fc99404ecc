r"""LaTeX's `\boxed{...}`: where mathematicians and models that learned from them put the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BETWEEN_ANSWERS = re.compile(r"[\s$]*(?:[,;/|]|\b(?:and|or)\b)[\s$]*(?:(?:and|or)\b[\s$]*)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A box of a text."""

    before: str
    """The text before it."""
    content: str
    """What it holds, stripped."""
    behind: str
    """The text behind it."""


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` or `\fbox{...}` that closes holds, stripped; None when there is none.

    Braces nest; an escaped one (`\{`) does not count. Takes time linear in the length of `text`.
    """
    box = last_box(text)
    return None if box is None else box.content


def last_box(text: str) -> Box | None:
    """As `last_boxed`, with what stands around the box."""
    end = len(text)
    for box in reversed(list(_BOX.finditer(text))):
        closing = _closing(text, box.end() - 1, end)
        if closing is not None:
            content = text[box.end() : closing].strip()
            return Box(before=text[: box.start()], content=content, behind=text[closing + 1 :])
        # What an earlier box holds ends before this one begins, or it would hold this one's beginning.
        end = box.start()
    return None


def answer_box(text: str) -> Box | None:
    r"""As `last_box`; of two boxes that are joined, `\boxed{3} or \boxed{4}`, the content is `3 or 4`."""
    box = last_box(text)
    earlier = None if box is None else last_box(box.before)
    if box is None or earlier is None or not _BETWEEN_ANSWERS.fullmatch(earlier.behind):
        return box
    return Box(before=earlier.before, content=f"{earlier.content} or {box.content}", behind=box.behind)


def _closing(text: str, opening: int, end: int) -> int | None:
    """Where the brace at `opening` closes, before `end`."""
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
