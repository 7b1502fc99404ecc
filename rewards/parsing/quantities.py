"""Exact parser for numbers as people and models write them."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from rewards.parsing.answers import final_answer, last_answer
from rewards.parsing.boxed import answer_box
from rewards.parsing.normalization import WORDS, plain_number
from rewards.parsing.scales import SCALE_WORD, scaled

MAX_QUANTITY_CHARS = 400
"""Longer texts are not read, which bounds the time and the numbers. GSM8K's longest answer has 11 characters."""

NO_NUMBER_FOUND = "no number could be read in the answer"
"""The detail of a grade whose answer could not be read as a number."""

_WHOLE = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+"
_NUMBER = re.compile(
    rf"(?:(?P<sign>[-+])(?P<gap>\s*))?(?P<money>\$?)"
    rf"(?:(?:(?P<mixed>[0-9]+)\s+(?:(?:and|&)\s+)?)?(?P<above>(?!0[0-9])(?:{_WHOLE}))\s*/\s*(?P<below>{_WHOLE})(?![0-9]|\.[0-9])"
    rf"|(?P<decimal>(?:{_WHOLE})(?:\.[0-9]*)?|\.[0-9]+)(?:[eE](?P<power>[-+]?[0-9]{{1,2}})(?![0-9]))?)"
)
_DIGIT = re.compile(r"[0-9]")

# The last side of an equation is read.
_EQUALITY = re.compile(r"=+|\\approx|\u2248")
_COMPARISON = re.compile(r"[<>\u2260\u2264\u2265\u00b1\u2213]|!=|\\(?:n?[lg]eq?q?|neq?|[lg]t|pm|mp)(?![a-zA-Z])")
# Matches the left side of an equation that is still to be solved: `2x = 18`, `x^2 = 9`; not `2 x 9 = 18`.
_UNSOLVED = re.compile(
    r"^\s*-\s*[xyzn]\s*$|[0-9|\u221a][-+/*|\s]*[xyzn](?![\w(]|\s*[0-9(])|(?<![\w\\])[xyzn]\s*(?:\^|[-+*/]\s*[0-9]|[\u00b2\u00b3])"
)
_NEXT_STATEMENT = re.compile(r"[,;\n]|\b(?:and|so|then|but)\b", re.IGNORECASE)
_ALTERNATIVE = re.compile(r"\b(?:or|nor|not|neither|cannot|never|except)\b|n't\b", re.IGNORECASE)

# What may come before a number and after it.
_BEFORE = re.compile(r"(?:^|[\s(\[{\"'\u201c\u2018:#])$")
_SUBTRACTED_FROM = re.compile(r"(?:\b[b-zB-Z]|[)\]}])\s+$")
_BEFORE_SPACED_SIGN = re.compile(r"(?:^|[(\[{:])\s*$")
_AFTER = re.compile(
    r"[)\]}\"'\u201d$]*[.,:;?]?[)\]}\"'\u201d]*(?:\s|$)|-(?=[^\W\d_]{2})|\s*/\s*(?=[^\W\d_]{2})|[^\W\d_]{2}"
    r"|[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]|[gshlLWVACFNJ\u03a9\u2126](?![^\W\d_])"
)
_VARIABLE = re.compile(r"\s*[b-zB-Z](?![\w.'])")
_UNIT = re.compile(r"\s*[gshlLmtWVACFNJI\u03a9\u2126](?![\w.'])")
_JOINS = re.compile(
    r"(?<=[^\W\d_])[-/\u00b7\u22c5](?=[^\W\d_])|(?<!\S)[-\u2014]+\s+(?=[^\W\d_]{2})|^-|^\s*/\s*(?=[^\W\d_]{2})"
)
_BOUND = re.compile(
    r"\b(?:than|at least|at most|up to|over|under|above|below|exceed\w*|beyond|between|times|plus)\s+(?:\w+\s+)?$",
    re.IGNORECASE,
)
# Number words, and words for operations on numbers.
_CHANGES = re.compile(
    r"(?<![a-z])(?:"
    r"zero|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen(?:ths?)?"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)(?:ty|tieths?)|(?:dozen|hundred|thousand|lakh|crore|\w*illion)(?:s|ths?)?"
    r"|hal(?:f|ve[sd]?)|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth)s?"
    r"|(?:an?|one|and)\s+quarters?|twice|thrice|double[sd]?|triple[sd]?|minus|negative|plus|squares? of|cubes? of"
    r"|(?:square |cube )?root|multiplied|divided|factorial|sqrt|log|ln|exp|pi|all but|and (?:up|above|over|change)"
    r"|million\w+|mil(?:[hj]\w+|i[o\u00f3]\w+)?|mille?|kk|bil|trn?|tril|mill?iard\w*|mld"
    r"|mill?on(?:es)?|tausend|\u0442\u044b\u0441\w*|\u043c\u043b\w+|\u043c\u0438\u043b\u043b\w+"
    r")(?![a-z])|[\u534a\u6253\u591a\u4f59\u51e0]",
    re.IGNORECASE,
)
_CHANGES_AT_ONCE = re.compile(
    r"[\s-]*(?:squared|cubed|(?:st|nd|rd|th)s|(?:grand|gross)(?!\s+[a-z])|scores?|tens|myriads?|googols?|crs?)(?![a-z])",
    re.IGNORECASE,
)
_QUARTERS = re.compile(r"[\s-]*quarters?(?![a-z])", re.IGNORECASE)
_PART_OF = re.compile(r"\b(?:an?|one)\s+$", re.IGNORECASE)
_ORDINAL = re.compile(r"(?:st|nd|rd|th)(?![a-z])", re.IGNORECASE)
# Characters considered around a box in a sentence: only what belongs to its number or changes it.
_NEAR = 40
_SIGN_BEFORE_BOX = re.compile(
    r"(?:(?<![\w)])[-\u2010-\u2013\u2212]|=\s*[-\u2212]\s*|\b(?:minus|negative)\s+)[$\\(]*$", re.IGNORECASE
)
# A box may contain only a part of a number or of a formula.
_PART_BEFORE_BOX = re.compile(r"(?:\b0\.|[0-9]\s*/\s*|\\(?:[dt]?frac|sqrt)\s*\{(?:[^{}]*\}\s*\{)?)$")
_POWER = r"(?:\u00d7|\\times|\\cdot|x|\*)\s*10\s*(?:\^|\*\*|[\u00b2-\u00b9\u2070-\u2079])(?:\{?-?[0-9]*\}?)"
_AFTER_BOX = re.compile(
    rf"(?:[\s~$]|\\[,;! )]|{WORDS})*"
    rf"(?:{SCALE_WORD}|hal(?:f|ves)|(?:third|fourth|fifth|sixth|eighth|tenth)s?|and a half"
    rf"|[\u00bc-\u00be\u2150-\u215e]|{_POWER})\}}?"
    r"|[\s$]*(?:[kmb]|bn)(?!\w)|[.,]?[0-9^]+|/\s*[0-9]+|[a-z](?![a-z])|[\s$]*\\(?:pi|sqrt|frac)(?![a-z])",
    re.IGNORECASE,
)
_PUNCTUATION = frozenset(".,:;!?'\"()[]{}#&$\u201c\u201d\u2018\u2014\u2026\u2234\u3002\uff0c\uff1a\u3001")


def read_quantity(text: str) -> Fraction | None:
    r"""Return the only number in a text, with everything that changes it; None if there is none, several, or it is
    unclear.

    The last side of an equation is read. `1,000`, `-$18.`, `2.50`, `\frac{1}{2}`, `2 1/2`, `1½`, `$3 million`, `18k`,
    `2 dozen` and `1.5 \times 10^3` are read exactly. Currencies, percent signs (`50%` is 50), units and most words are
    ignored. Returns None if a word or sign that could change the number is not understood: `half of 18`, `18!`,
    `more than 18`, `5 or 6`, `(5)`, `18m` (metres or millions). Takes bounded time; only ASCII digits count.
    """
    if len(text) > MAX_QUANTITY_CHARS:
        return None
    side = _last_side(plain_number(text))
    found = None if side is None else _NUMBER.search(side)
    if side is None or found is None:
        return None
    before, after = side[: found.start()], side[found.end() :]
    value = _value(found)
    if value is None or _DIGIT.search(before + after) or not _may_stand_before(before, found):
        return None
    value, rest = scaled(value, after, is_money=bool(found["money"]))
    return value if _may_stand_after(rest, before, found) and _is_passed_over(before, rest) else None


def final_quantity(text: str) -> str | None:
    r"""Return the same as `final_answer`, with the text next to a box that changes its number: `-\boxed{5}`,
    `\boxed{3} million`."""
    tagged = last_answer(text)
    box = answer_box(tagged if tagged else text)
    if box is None or not box.content:
        return final_answer(text)
    near = box.before[-_NEAR:]
    before = _SIGN_BEFORE_BOX.search(near) or _PART_BEFORE_BOX.search(near)
    after = _AFTER_BOX.match(box.after[:_NEAR])
    return f"{before[0] if before else ''}{box.content}{after[0].replace('$', '') if after else ''}"


def _last_side(text: str) -> str | None:
    """Return the last side of an equation, or all of another text; None if it makes more than one statement."""
    if _COMPARISON.search(text) or _ALTERNATIVE.search(text):
        return None
    sides = _EQUALITY.split(text)
    if any(map(_UNSOLVED.search, sides[-2:-1])) or any(map(_NEXT_STATEMENT.search, sides[1:-1])):
        return None
    return sides[-1]


def _value(number: re.Match[str]) -> Fraction | None:
    sign = -1 if number["sign"] == "-" else 1
    if number["decimal"]:
        value = Fraction(number["decimal"].replace(",", "").rstrip("."))
        return sign * value * Fraction(10) ** int(number["power"] or 0)
    above, below = (int(number[name].replace(",", "")) for name in ("above", "below"))
    if below == 0 or (number["mixed"] and not 0 < above < below):
        return None
    return sign * (int(number["mixed"] or 0) + Fraction(above, below))


def _may_stand_before(before: str, number: re.Match[str]) -> bool:
    """Return whether a number can begin after `before`."""
    if number["gap"]:
        return _BEFORE_SPACED_SIGN.search(before) is not None
    if number["sign"] and _SUBTRACTED_FROM.search(before):
        return False
    return _BEFORE.search(before) is not None and not _BOUND.search(before)


def _may_stand_after(rest: str, before: str, number: re.Match[str]) -> bool:
    """Return whether a number, with its scale, can end before `rest`."""
    if not _AFTER.match(rest) or _CHANGES_AT_ONCE.match(rest):
        return False
    if _VARIABLE.match(rest) and not _UNIT.match(rest):
        return False
    if number["decimal"] in ("1", "3") and _QUARTERS.match(rest):
        return False
    if number["decimal"] and _ORDINAL.match(rest) and _PART_OF.search(before):
        return False
    # In accounting, a number in parentheses is negative.
    return bool(number["sign"]) or not (before.rstrip().endswith("(") and rest.lstrip().startswith(")"))


def _is_passed_over(before: str, rest: str) -> bool:
    """Return whether the words and signs around a number do not change it."""
    around = f"{_JOINS.sub(' ', before)} {_JOINS.sub(' ', rest)}"
    if _CHANGES.search(around):
        return False
    return all(
        character.isspace()
        or character in _PUNCTUATION
        or (character.isalpha() and not character.isnumeric())
        or unicodedata.category(character) in ("So", "Mn")
        for character in around
    )
