"""Parser for expressions and equations as people write them: LaTeX, typography, Markdown, prose."""

from __future__ import annotations

import re
from fractions import Fraction

from rewards.parsing.answers import final_answer, last_answer
from rewards.parsing.arithmetic import EvaluatedExpression, evaluate
from rewards.parsing.boxed import answer_box
from rewards.parsing.normalization import PLAIN_CHARACTERS

MAX_EQUATION_CHARS = 1000
"""Longer answers are not read, which bounds the time."""

_SIGNS = str.maketrans(
    PLAIN_CHARACTERS
    | dict.fromkeys("\u00d7\u2715\u2716\u2a2f\u2217\u22c5\u00b7\u2022\u2219\u30fb\uff0a", "*")
    | dict.fromkeys("\u00f7\uff0f\u2797", "/")
    | dict.fromkeys("\ufe62\uff0b\u2795", "+")
    | dict.fromkeys("\uff1d\u2192\u21d2\u2261", "=")
    | {"\u2796": "-", "\uff08": "(", "\uff09": ")", "\r": "\n"}
)
_REPLACEMENTS = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|quad|qquad)(?![a-zA-Z])|\\{1,2}[,;:! ()\[\]]|[$~&]", " "),
        (r"</?(?:b|i|em|strong|p|br|code)\s*/?>|<\|\w+\|>", " "),
        (r"\\\\(?=\s|$)", "\n"),
        (r"\\(?:begin|end)\{[a-z]+\*?\}", " "),
        (r"\\[{}]", " "),
        # Markdown's escapes.
        (r"\\([*+=-])", r"\1"),
        (r"\\(?:text|mathrm|mathbf|textbf|boxed)\s*(?=\{)", ""),
        (r"\\(?:times|cdot|ast|bullet)(?![a-zA-Z])", "*"),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"\\(?:[dtc])?frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"(?i)\bplus\b", "+"),
        (r"(?i)\bminus\b", "-"),
        (r"(?i)\b(?:times|multiplied by)\b", "*"),
        (r"(?i)\bdivided by\b", "/"),
        (r"(?i)(?:,?\s*\bwhich\s+)?\b(?:equals|is equal to|gives|makes)\b|[=-]+>|={2}", "="),
        # Continuation lines of an equation, a trailing `(= 98)`, and remarks in parentheses.
        (r"\n\s*=", " ="),
        (r"\(\s*=\s*([^()=]*)\)\s*(?=[.\s]*$)", r"= \1"),
        (r"\(\s*[^\W\d_][^()\[\]0-9+*/-]*\)", " "),
        (r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", ""),
    )
]
_FRACTION = re.compile(r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_BRACKETS = str.maketrans("[]{}", "()()")
_CROSS = re.compile(r"(?<=[0-9)])\s*[xX]\s*(?=[0-9(])")
_COLON = re.compile(r"(?<=[0-9)])(\s?):\1(?=[0-9(])")
_FACTOR_BEFORE_BRACKET = re.compile(r"(?<=[0-9])[ \t]*(?=[(\[])")
_FACTOR_AFTER_BRACKET = re.compile(r"(?<=[)\]])[ \t]*(?=[0-9(\[])")

_BETWEEN_STATEMENTS = re.compile(r"[;\n]|[,:]\s|(?<=[0-9)])\.\s")
_OPERATION = re.compile(r"[0-9)]\s*[-+*/]\s*[0-9(]")
_NUMBER = re.compile(r"\s*(-?[0-9]+(?:\.[0-9]+)?)\s*")
_ENDS = re.compile(r"[0-9()]")
_AROUND = re.compile(r"(?:[^\W\d_]|[\s*_#>\"'`:,;.\u201c\u201d\u2713\u2714\u2705])*")
_CHANGES = re.compile(
    r"(?i)\b(?:\w*root|sqrt|squared?|cubed?|half|twice|double|triple|negative|log|ln|abs|not|mod|factorial|percent|of|wrong|incorrect)\b"
)


def final_equation(text: str) -> str | None:
    r"""Return the same as `final_answer`, with the rest of a box's equation: `2 + 3 = \boxed{5}`, `\boxed{2+3} = 5`."""
    tagged = last_answer(text)
    box = answer_box(tagged if tagged else text)
    if box is None or not box.content:
        return final_answer(text)
    line = box.before.rpartition("\n")[2].rstrip("$ \\([") if _NUMBER.fullmatch(box.content) else ""
    right = re.match(r"[\s$]*=[\s$]*-?[0-9.]+", box.after)
    return f"{line} {box.content}{right[0] if right else ''}".strip()


def read_statements(text: str) -> list[tuple[EvaluatedExpression, ...]]:
    """Return the statements of an answer, each as its evaluated sides: an equation has several, an expression one.

    A statement with a side that is no expression gives (). Lines are statements, and so are steps separated by
    semicolons or commas. If any has an operator, those without are ignored. Typographic and LaTeX signs, `x` and `:`
    between numbers, brackets of any kind, `2(3+4)` and words at both ends are read as people mean them. Powers,
    factorials, remainders and joined digits are not expressions. Takes bounded time; returns [] for an answer longer
    than `MAX_EQUATION_CHARS`.
    """
    if len(text) > MAX_EQUATION_CHARS:
        return []
    said = [part for part in _BETWEEN_STATEMENTS.split(_plain(text)) if _ENDS.search(part)]
    return [_sides(statement) for statement in [part for part in said if _OPERATION.search(part)] or said]


def _sides(statement: str) -> tuple[EvaluatedExpression, ...]:
    first, *others = statement.split("=")
    # The name in `x = 44 + 19` is not a side, and neither is the empty end of an unfinished equation.
    is_named = others and not _ENDS.search(first)
    written = [side for side in (others if is_named else [first, *others]) if side.strip()]
    sides = [side for side in map(_evaluated, written) if side is not None]
    return tuple(sides) if len(sides) == len(written) else ()


def _plain(text: str) -> str:
    """Return the text in plain characters: digits, + - * / and parentheses."""
    text = text.translate(_SIGNS)
    for pattern, plain in _REPLACEMENTS:
        text = pattern.sub(plain, text)
    # Must come before fractions are rewritten: `2\frac{1}{2}` is a mixed number, not a product.
    text = _FACTOR_BEFORE_BRACKET.sub("*", text)
    # From the inside out: each pass rewrites at least one fraction, since the innermost contain no other.
    while (turned := _FRACTION.sub(r"((\1)/(\2))", text)) != text:
        text = turned
    text = _FACTOR_AFTER_BRACKET.sub("*", text).translate(_BRACKETS)
    return _COLON.sub("/", _CROSS.sub("*", text))


def _evaluated(side: str) -> EvaluatedExpression | None:
    side = _without_words(side)
    number = _NUMBER.fullmatch(side)
    if number and not side.strip().isdecimal():
        return EvaluatedExpression(value=Fraction(number[1]), numbers=(), operators=frozenset())
    return evaluate(side)


def _without_words(side: str) -> str:
    """Return a side without the words and the emphasis at its ends."""
    ends = [found.start() for found in _ENDS.finditer(side)]
    if not ends:
        return side
    before, after = side[: ends[0]], side[ends[-1] + 1 :]
    if _CHANGES.search(before) or _CHANGES.search(after) or before[-1:].isalpha() or after[:1].isalpha():
        return side
    start = ends[0] if _AROUND.fullmatch(before) and before[-1:] != "." else 0
    end = ends[-1] + 1 if _AROUND.fullmatch(after) else len(side)
    return side[start:end]
