"""What stands behind a number and multiplies it: `million`, `k`, `dozen`, `and a half`."""

from __future__ import annotations

import re
from fractions import Fraction

_WORDS = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "lakh": 10**5,
    "million": 10**6,
    "mln": 10**6,
    "mio": 10**6,
    "mn": 10**6,
    "crore": 10**7,
    "billion": 10**9,
    "bln": 10**9,
    "bn": 10**9,
    "mrd": 10**9,
    "trillion": 10**12,
    "tn": 10**12,
}
# A letter is a scale where it can be no unit. `18m` may be metres or millions, and is no scale; `$18m` is one.
_LETTERS = {
    "k": 10**3,
    "K": 10**3,
    "m": 10**6,
    "M": 10**6,
    "mm": 10**6,
    "MM": 10**6,
    "b": 10**9,
    "B": 10**9,
    "t": 10**12,
    "T": 10**12,
}

SCALE_WORD = rf"({'|'.join(_WORDS)})s?(?![a-zA-Z])"
"""A regular expression of them, in lower case."""

_HALF = re.compile(r"\s+and\s+(?:a|one)\s+half(?![a-zA-Z])", re.IGNORECASE)
_WORD = re.compile(rf"[\s-]*{SCALE_WORD}", re.IGNORECASE)
_LETTER = re.compile(r"(?:k|K|M|MM|B)(?![a-zA-Z0-9])|\s+k(?![a-zA-Z0-9])")
_LETTER_OF_MONEY = re.compile(r"\s*(?:mm|MM|[kKmMbBtT])(?![a-zA-Z0-9])")


def scaled(value: Fraction, behind: str, *, is_money: bool) -> tuple[Fraction, str]:
    """A number with what stands directly behind it, and the text behind both.

    `3` and ` million dollars` are 3,000,000 and ` dollars`. Of amounts of money `m`, `b` and `t` are scales too.
    """
    if half := _HALF.match(behind):
        value, behind = value + Fraction(1, 2), behind[half.end() :]
    letter = (_LETTER_OF_MONEY if is_money else _LETTER).match(behind)
    if letter:
        value, behind = value * _LETTERS[letter[0].strip()], behind[letter.end() :]
    while word := _WORD.match(behind):
        value, behind = value * _WORDS[word[1].lower()], behind[word.end() :]
    return value, behind
