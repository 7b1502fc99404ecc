"""Numbers as people and models write them, read exactly."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_QUANTITY_CHARS = 400
"""Longer texts are no quantity. It bounds the time and the numbers; GSM8K's longest answer has 11 characters."""

_COMMAND = r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|rm|bf)\s*\{"
_COMMAND_WITH_WORDS = re.compile(rf"{_COMMAND}([^{{}}]*)\}}")
_FRACTION = re.compile(r"(?:(-)\s*)?\\[dt]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}")
# What may stand between a sign and its number.
_AFTER_SIGN = re.compile(rf"(?<=-)(?:{_COMMAND}|\\left(?![a-zA-Z])|\\[,!;: ]|[{{(])+")
# Thousands may be set apart by LaTeX's thin space, and money may stand between a sign and its number.
_WITHIN_NUMBER = re.compile(r"(?<=[0-9])(?:\\[,!]|\{,\})(?=[0-9]{3}(?![0-9]))|(?<![0-9])\\?[$\u20ac\u00a3]")
# Per cent and money say what is counted, not how many; other spaces, emphasis and empty boxes say nothing.
_UNSAID = re.compile(
    r"\\[$%,!;: ]|[$%~\u20ac\u00a3]|\*\*|\\(?:quad|qquad|left|right)(?![a-zA-Z])|\\boxed\s*\{\s*\}"
    r"|(?<=[0-9]):00(?![0-9:])"
)
_EQUALITY = re.compile(r"=|\\approx|\u2248")
_WHOLE = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+"
_NUMBER = re.compile(
    rf"(?<![\w.,^/])(?P<sign>-?)"
    rf"(?:(?:(?P<mixed>[0-9]+)\s+)?(?P<above>{_WHOLE})\s*/\s*(?P<below>{_WHOLE})(?![0-9]|\.[0-9])"
    rf"|(?P<decimal>(?:{_WHOLE})(?:\.[0-9]*)?|\.[0-9]+)(?![0-9]))"
    rf"(?!\s*[\^/])"
)
_DIGIT = re.compile(r"[0-9]")


def read_quantity(text: str) -> Fraction | None:
    r"""The one number that a text says; None when it says none, or several.

    Of an equation, the number after the last sign. Currencies, per cent (`50%` is 50), units and words are passed over;
    `1,000`, `1{,}000`, `$18.`, `2.50`, `2:00 pm`, `\frac{1}{2}`, `1/2` and `2 1/2` are read exactly. Nothing is
    calculated: `2*9` and `10^3` are several numbers. Takes bounded time; only ASCII digits count.
    """
    if len(text) > MAX_QUANTITY_CHARS:
        return None
    plain = _WITHIN_NUMBER.sub("", text.replace("\u2212", "-"))
    plain = _COMMAND_WITH_WORDS.sub(r" \1 ", _AFTER_SIGN.sub("", plain))
    plain = _FRACTION.sub(r" \1\2/\3 ", plain)
    last = _EQUALITY.split(_UNSAID.sub(" ", plain))[-1]
    found = list(_NUMBER.finditer(last))
    if len(found) != 1 or _DIGIT.search(last[: found[0].start()] + last[found[0].end() :]):
        return None
    return _value(found[0])


def _value(number: re.Match[str]) -> Fraction | None:
    sign = -1 if number["sign"] else 1
    if number["decimal"]:
        return sign * Fraction(number["decimal"].replace(",", "").rstrip("."))
    above, below = (int(number[name].replace(",", "")) for name in ("above", "below"))
    return sign * (int(number["mixed"] or 0) + Fraction(above, below)) if below else None
