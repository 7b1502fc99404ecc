"""The first d1's evaluation of maths: its answer extraction and its equality test.

Reimplements `eval/parse_and_get_acc.py` and `eval/parser_helper.py` (Apache-2.0), their oddities included. Some of
their regular expressions take quadratic time on hostile text; these functions return the same in linear time.
"""

from __future__ import annotations

import re

from rewards.first_d1.parsers import boxed, tagged

_BOX = "\\boxed{"
_CLOSING_OR_LINE_END = re.compile(r"[}\n]")
_NUMBER = re.compile(r"-?\d+\.?\d*")
_TRUTH = re.compile(r"####\s*+\$?([\d,]+(?:\.\d+)?)")
# In d1's order. It removes invisible markup, and takes `\text{ ` for the start of a unit.
_REMOVED_FIRST = (
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
)
_UNIT = "\\text{ "


class _D1RaisesError(Exception):
    """d1's code raises here; it then continues with the unchanged text."""


def gsm8k_number(text: str) -> float | None:
    r"""Return the number of a GSM8K completion as `parse_gsm_answers` does; None if there is none.

    From the first `\boxed{...}` on one line that has a number: all of it, or the first number in it (`1,000` is 1).
    Without such a box, from the first closed `<answer>`: all of it, or the last number in it. Numbers are parsed by
    Python's `float`, which also accepts `1_000`, `inf` and `nan`.
    """
    for box in _boxes(text):
        found = _float(box)
        if found is None and (number := _NUMBER.search(box)):
            found = _float(number.group())
        if found is not None:
            return found
    answer = tagged(text) or ""
    found = _float(answer)
    if found is None and (numbers := _NUMBER.findall(answer)):
        found = _float(numbers[-1])
    return found


def gsm8k_truth(solution: str) -> float | None:
    """Return the reference number of a GSM8K row as d1's `extract_answer_gsm8k` does; None for `#### -3`."""
    match = _TRUTH.search(solution)
    return None if match is None else _float(match.group(1).replace(",", ""))


def math_answer(text: str) -> str | None:
    """Return the answer of a MATH completion as `parse_math_answers` does; None if there is none.

    The box, or else the whole text. If that is empty or its braces never close, the content of the first closed
    `<answer>`.
    """
    answer = boxed(text)
    if answer:
        return answer
    tag = tagged(text)
    return answer if tag is None else tag


def equivalent(a: str, b: str) -> bool:
    """Return whether d1's `is_equiv` considers two answers equal: they are normalized and compared as strings."""
    try:
        return _normalized(a) == _normalized(b)
    except _D1RaisesError:
        return a == b


def _boxes(text: str) -> list[str]:
    r"""Return the contents of all `\boxed{...}` that close on their line, each up to its first closing brace."""
    found = []
    start = text.find(_BOX)
    while start >= 0:
        end = _CLOSING_OR_LINE_END.search(text, start + len(_BOX))
        if end is None:
            break
        if end.group() == "}":
            found.append(text[start + len(_BOX) : end.start()].strip())
        start = text.find(_BOX, end.end())
    return found


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _normalized(text: str) -> str:
    """Normalize a text as `strip_string` does. Raises _D1RaisesError where that raises."""
    for old, new in _REMOVED_FIRST:
        text = text.replace(old, new)
    text = _without_unit(text).replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text[0] == ".":
        text = "0" + text
    sides = text.split("=", 2)
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = _with_braced_fractions(_with_braced_roots(text).replace(" ", ""))
    return "\\frac{1}{2}" if text == "0.5" else _with_fraction_for_slash(text)


def _without_unit(text: str) -> str:
    pieces = text.split(_UNIT, 2)
    if len(pieces) > 2:
        raise _D1RaisesError
    return pieces[0]


def _with_braced_roots(text: str) -> str:
    head, *roots = text.split("\\sqrt")
    if not all(roots):
        raise _D1RaisesError
    return "\\sqrt".join([head, *(root if root[0] == "{" else f"{{{root[0]}}}{root[1:]}" for root in roots)])


def _with_braced_fractions(text: str) -> str:
    head, *fractions = text.split("\\frac")
    spelled = [head]
    for fraction in fractions:
        if not fraction:
            raise _D1RaisesError
        if fraction[0] == "{":
            spelled.append(fraction)
        elif len(fraction) < 2:
            return text
        elif fraction[1] == "{":
            spelled.append(f"{{{fraction[0]}}}{fraction[1:]}")
        else:
            spelled.append(f"{{{fraction[0]}}}{{{fraction[1]}}}{fraction[2:]}")
    return "\\frac".join(spelled)


def _with_fraction_for_slash(text: str) -> str:
    sides = text.split("/", 2)
    if len(sides) != 2:
        return text
    try:
        above, below = map(int, sides)
    except ValueError as error:
        raise _D1RaisesError from error
    return f"\\frac{{{above}}}{{{below}}}" if text == f"{above}/{below}" else text
