"""Scale words after a number that multiply it: `million`, `k`, `dozen`, `and a half`."""

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
# A letter is a scale only if it cannot be a unit. `18m` may be metres or millions, so it is not scaled; `$18m` is.
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
"""A regular expression for the scale words, in lower case."""

_HALF = re.compile(r"\s+and\s+(?:a|one)\s+half(?![a-zA-Z])", re.IGNORECASE)
_WORD = re.compile(rf"[\s-]*{SCALE_WORD}", re.IGNORECASE)
_LETTER = re.compile(r"(?:k|K|M|MM|B)(?![a-zA-Z0-9])|\s+k(?![a-zA-Z0-9])")
_LETTER_OF_MONEY = re.compile(r"\s*(?:mm|MM|[kKmMbBtT])(?![a-zA-Z0-9])")


def scaled(value: Fraction, after: str, *, is_money: bool) -> tuple[Fraction, str]:
    """Return a number multiplied by the scale directly after it, and the text after both.

    `3` and ` million dollars` give 3,000,000 and ` dollars`. For amounts of money `m`, `b` and `t` are scales too.
    """
    if half := _HALF.match(after):
        value, after = value + Fraction(1, 2), after[half.end() :]
    letter = (_LETTER_OF_MONEY if is_money else _LETTER).match(after)
    if letter:
        value, after = value * _LETTERS[letter[0].strip()], after[letter.end() :]
    while word := _WORD.match(after):
        value, after = value * _WORDS[word[1].lower()], after[word.end() :]
    return value, after
