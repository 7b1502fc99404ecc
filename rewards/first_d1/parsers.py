"""The first d1's extraction of answers from completions: boxes, Countdown expressions, Sudoku cells.

Its parsers (`eval/parse_and_get_acc.py`, Apache-2.0) use `eval`, and regular expressions of which some take quadratic
time on hostile text. These functions return the same in linear time and execute nothing.
"""

from __future__ import annotations

import re

_BOXED, _FBOX = "\\boxed", "\\fbox"
_ENDS = re.compile(r"<\|eot_id\|>|<\|endoftext\|>|</answer>")
_EQUALS = re.compile(r"=[0-9. ]")
_CELLS = re.compile(r"[\d\s]*")
_CLOSED_GRID = re.compile(r"(\d{16})\s*</answer>")
_ANY_GRID = re.compile(r"\b(\d{16})\b")
_EXPRESSION_CHARACTERS = frozenset("0123456789+-*/() ")
_FENCE = "```"


def boxed(text: str) -> str | None:
    r"""Return the boxed answer as the first d1 extracts it: `parser_helper.py`, `last_boxed_only_string`,
    `remove_boxed`.

    If there is a `\boxed ` with a space, the text after the last of those, up to a dollar sign. Otherwise the content
    of the last `\boxed`, or of the last `\fbox` including its command. The whole text if there is no box. None where
    d1's code raises because the braces never close.
    """
    spaced = _BOXED + " "
    if spaced in text:
        return text.rpartition(spaced)[2].partition("$")[0]
    start = text.rfind(_BOXED)
    if start < 0 and (start := text.rfind(_FBOX)) < 0:
        return text
    depth = 0
    for place in range(start, len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                box = text[start : place + 1]
                return box[len(_BOXED) + 1 : -1] if box.startswith(_BOXED + "{") else box
    return None


def tagged(text: str) -> str | None:
    """Return the stripped content of the first closed `<answer>`; None if there is none."""
    start = text.find("<answer>")
    end = text.find("</answer>", start + 8)
    return None if start < 0 or end < 0 else text[start + 8 : end].strip()


def countdown_expression(text: str) -> str:
    """Return the expression of a Countdown completion as `parse_countdown_answers` does.

    The box, or else the whole text, with LaTeX's operators replaced by Python's, and of an equation only the left side.
    d1 looks for tags only if the braces of a box never close.
    """
    found = boxed(text)
    if found is None:
        answer = tagged(text)
        found = text if answer is None else answer
    for latex, operator in (("\\div", "/"), ("\\times", "*"), ("\\cdot", "*")):
        found = found.replace(latex, operator)
    for equals in _EQUALS.finditer(found):
        start = equals.start()
        while start and found[start - 1] in _EXPRESSION_CHARACTERS:
            start -= 1
        if start < equals.start():
            return found[start : equals.start()].strip()
    return found


def sudoku_cells(text: str) -> str:
    """Return the cells of a Sudoku completion without white space, not yet cut to 16, as `parse_sudoku_answers` does.

    The first of: digits between fences after `<answer>`; the content of `<answer>`, up to any end marker; the text
    after `</answer>`; 16 digits before `</answer>`; 16 digits anywhere. Empty if there is none.
    """
    found = _fenced(text) or _answered(text) or _after_answer(text)
    for pattern in (_CLOSED_GRID, _ANY_GRID):
        if not found and (match := pattern.search(text)):
            found = match.group(1)
    return "".join(found.split())


def _fenced(text: str) -> str:
    start = text.find("<answer>")
    fence = text.find(_FENCE, start + 8) if start >= 0 else -1
    while fence >= 0:
        run = _CELLS.match(text, fence + 3)
        assert run is not None, "it matches nothing, too"
        if run.group() and text.startswith(_FENCE, run.end()):
            return run.group().strip()
        fence = text.find(_FENCE, fence + 1)
    return ""


def _answered(text: str) -> str:
    start = text.find("<answer>")
    end = _ENDS.search(text, start + 8) if start >= 0 else None
    return text[start + 8 : end.start()].strip() if end else ""


def _after_answer(text: str) -> str:
    start = text.find("</answer>")
    if start < 0:
        return ""
    ends = (text.find(mark, start + 9) for mark in ("<|eot_id|>", "<|endoftext|>"))
    return text[start + 9 : min((end for end in ends if end >= 0), default=len(text))].strip()
