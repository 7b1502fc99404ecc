"""Normalization of numbers in LaTeX, Markdown and typography to plain characters."""

from __future__ import annotations

import re
import unicodedata

PLAIN_CHARACTERS = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"),
    **dict.fromkeys("\u2044\u2215", "/"),
    **dict.fromkeys("\u00a0\u2009\u202f", " "),
    # Invisible characters: joiners, direction marks, soft hyphens, byte order marks.
    **dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufe0f\ufeff", ""),
}
"""Typographic characters and their plain equivalents in numbers and expressions."""

_CHARACTERS = str.maketrans(
    PLAIN_CHARACTERS
    | dict.fromkeys("\u20ac\u00a3\u00a5\u20b9\u20a9\u20bd\u20ba\u20ab\u20aa", "$")
    | {"\u2019": "'", "\u00a2": " cents ", "\u00b0": " degrees ", "\u2103": " degrees C", "\u2109": " degrees F"}
)
_VULGAR = re.compile(r"([0-9]?)\s*([\u00bc-\u00be\u2150-\u215e\u2189])")
# All thousands separators of a number must be the same.
_THOUSANDS = re.compile(
    r"(?<![\w.,/])([1-9][0-9]{0,2}(?P<gap>[ '~]|\\[,! ]|,\\!|\{,\})[0-9]{3}(?:(?P=gap)[0-9]{3})*)"
    r"(?![\w/]|\s*/|[,.'][0-9]|(?P=gap)[0-9])"
)
_POWER_OF_TEN = re.compile(r"(?<![\w.,])10([\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]{1,2})")

WORDS = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|sf|it)|[mh]box|rm|bf|bm|boldsymbol|emph|underline)\s*\{"
"""A regular expression for the start of a LaTeX text group within a formula."""

_FRACTION = r"\\(?:[dtc]|s|nice)?frac\s*"
_UNIT = (
    r"[cdkm]?m|in|ft|yd|mi|(?<=/)(?:s|sec|hr?)|(?:centi|deci|kilo|milli)?met(?:er|re)s?|inch(?:es)?|feet|foot|yards?|miles?"
    r"|units?"
)
# Applied in order: later patterns see the result of earlier ones.
_REPLACEMENTS = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        # Tags, complete or truncated at the end; emphasis; boxes that are empty or unclosed.
        (
            r"</?(?:answer|b|i|u|em|strong|p|br|div|span|code)\s*/?>|</?answer$|<\|\w+\|>|^\s*(?:[-=]+>|\u2192|\u21d2)",
            " ",
        ),
        (r"(?<![\w*\\])(\*{1,3}|_{1,2}|`{1,3})(?![\s*])([^*`]+?)(?<!\s)\1(?!\w)", r"\2"),
        (r"\\\.?boxed\s*(?:\{\s*\}|\{?)", " "),
        (r"~~", " not "),
        # A bullet below other text is no minus.
        (r"(?<=[^\s=])\s*\n\s*[-*\u2022]\s+", "\n"),
        # Math delimiters; after that, every dollar sign is money.
        (r"(?<!\\)\$([^$]*[^$\\])\$|\\[()\[\]]", r" \1 "),
        (r"\\?\$\s*(?:\\?\$\s*)*|\b(?:Rs\.?|USD|EUR|GBP)\s*(?=[0-9])", "$"),
        (r"\b[A-Z]{1,2}(?=\$)", ""),
        # Fractions, and what may come between a sign and its number.
        (rf"(?<=-)(?:{WORDS}|\\left(?![a-zA-Z])|\\[,!;: ]|[{{(])+", ""),
        (rf"{WORDS}([^{{}}]*)\}}", r" \1 "),
        (rf"({_FRACTION})(?:\{{([0-9]+)\}}|([0-9]))\s*(?:\{{([0-9]+)\}}|([0-9]))", r"\1{\2\3}{\4\5}"),
        (rf"(?:(-)\s*)?{_FRACTION}\{{\s*(-?)\s*([0-9]+)\s*\}}\s*\{{\s*([0-9]+)\s*\}}", r" \1\2\3/\4 "),
        # Units whose exponent is not part of the number, and fractions of units.
        (r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\(?:degree|circ)(?![a-zA-Z]))", " degrees "),
        (rf"{_FRACTION}(?:\{{\s+[a-zA-Z]+\s+\}}\s*){{2}}", "units "),
        (
            rf"(?<![a-zA-Z\\])(?:(?:{_UNIT})\s*(?:\^\s*(?:\{{\s*[23]\s*\}}|[23])|[\u00b2\u00b3])|(?:[cdkm]?m|ft)[23])(?![\w^])",
            "units ",
        ),
        # Powers of ten, and numbers multiplied by one.
        (
            r"(?:(?<![\w.,^])|(?<=\\cdot)|(?<=\\times))10\s*(?:\^|\*\*)\s*(?:\{\s*([-+]?[0-9]{1,2})\s*\}|([-+]?[0-9]{1,2}))(?![\w^]|[.,][0-9])",
            r"1e\1\2",
        ),
        (r"(?<=[0-9])\s*(?:\u00d7|\\times|\\cdot|\u00b7|\*|x)\s*1e", "e"),
        # Spaces, sizes and colours. The percent sign is treated as a unit: `50%` is 50. `2:00` is two o'clock.
        (
            r"\\[,!;: %]|[%~]|\\(?:q?quad|left|right|displaystyle|bf|it|rm|small|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])"
            r"|\\(?:text)?color\s*\{[a-z]+\}|(?<=[0-9]):00(?![0-9:])",
            " ",
        ),
        (r"(?i)\b(?:minus|negative|neg\.?)\s+(?=\$?[0-9.])", "-"),
        (r"\$([-+])\s*", r"\1$"),
    )
]


def plain_number(text: str) -> str:
    r"""Return the text with its numbers normalized: `-\$1{,}000` as `-$1,000`, `1½` as `1 1/2`, `5 \times 10^3` as
    `5e3`.

    Every currency becomes `$`. Anything without a plain spelling stays as it is.
    """
    text = text.translate(_CHARACTERS)
    text = _VULGAR.sub(_plain_fraction, text)
    text = _POWER_OF_TEN.sub(lambda found: f"10^{_plain_digits(found[1])}", text)
    text = _THOUSANDS.sub(lambda found: found[1].replace(found["gap"], ","), text)
    for pattern, plain in _REPLACEMENTS:
        text = pattern.sub(plain, text)
    return text


def _plain_fraction(found: re.Match[str]) -> str:
    fraction = _plain_digits(found[2])
    return f"{found[1]} {fraction} " if found[1] else f"{fraction} "


def _plain_digits(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\u2044", "/").replace("\u2212", "-")
