"""Parser that splits a written math answer into its expression and its unit."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from rewards.maths.markup import TEXT, stripped, without_delimiters, without_markup
from rewards.maths.units import SCALES, SUFFIXES, Unit, is_letter, read_unit

MAX_CHARS = 2000
"""Longer texts are not split, which bounds the time."""

_MONEY = re.compile(r"(?:US)?\\\$")
_RATE = re.compile(r"/\s*([A-Za-z]+)$")
_CURRENCY = re.compile(
    rf"(?:{TEXT}\s*(?P<text>EUR|GBP|JPY|Rs|USD)\.?\s*\}}|(?P<word>EUR|GBP|JPY|Rs|USD)\.?)\s*(?=[0-9])"
)
_IN_BRACKETS = re.compile(r"(?<=[0-9}\s])\s*\(([A-Za-z][A-Za-z /^0-9{}]*)\)$")
_UNIT_FRACTION = re.compile(
    rf"\\frac\{{\s*({TEXT}[^{{}}]*\}}(?:\^\{{[0-9]\}})?)\s*\}}\{{\s*({TEXT}[^{{}}]*\}}(?:\^\{{[0-9]\}})?)\s*\}}$"
)
_TOKEN = re.compile(
    rf"(?P<text>{TEXT}[^{{}}]*\}})|(?P<degree>\^\s*\{{?\s*(?:\\circ|o)(?![a-zA-Z])\s*\}}?|\\degree(?![a-zA-Z]))"
    r"|(?P<power>\^\s*(?:\{\s*-?[0-9]\s*\}|-?[0-9]))|(?P<percent>\\?%)"
    r"|(?P<gap>\\[,;:! ]|\\q?quad(?![a-zA-Z])|\\cdot(?![a-zA-Z])|~)"
    r"|(?P<word>[A-Za-z]+(?:[.'][A-Za-z]+)*)|(?P<link>\s+|[./*'-])|(?P<other>\\(?:[a-zA-Z]+|.)|[0-9][0-9.,]*|.)",
    re.DOTALL,
)
_BEGINS_A_TAIL = frozenset({"text", "degree", "percent", "word"})
_GAP_AFTER = re.compile(r"(?:\s|~|\\(?:[,;:! ]|q?quad(?![a-zA-Z])|cdot(?![a-zA-Z])))+$")
_ENDS_A_NUMBER = re.compile(r"(?:[0-9)}\]!]|\\(?:pi|infty))$")
_ENDS_OPEN = re.compile(
    r"(?:[-+*/^_=<>,;:({\[&|]|\\(?:cdot|times|div|pm|le|ge|ne|in|cup|cap|frac|sqrt|to|mid|sin|cos|tan|log|ln))$"
)
_PERCENT_WORD = re.compile(r"\b(?:percent|percentage|per cent|pct)\b\.?|\\?%")
_CONJUNCTION = r"\\text\s*\{\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"
_SEPARATOR = re.compile(rf",\s*(?:{_CONJUNCTION})?|{_CONJUNCTION}|;")
_BRACKET = re.compile(r"((?:\\left)?(?:[(\[]|\\\{))(.*?)((?:\\right)?(?:[)\]]|\\\}))")
_DECIMAL = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_LETTER = re.compile(r"[a-zA-Z]")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedAnswer:
    """A parsed answer."""

    expression: str
    """LaTeX without surrounding markup, units and words."""
    unit: Unit = frozenset()
    """The measures after the number."""
    percent: bool = False
    """Whether a percent sign follows the expression."""
    letters: str = ""
    """Letters directly after the number: a unit or a scale, or symbols that belong to the expression."""
    container: str = ""
    """The bracket that opens a list: `(`, `[` or `{`."""

    @property
    def symbolic(self) -> str:
        """The expression with its letters as symbols."""
        return f"{self.expression} {self.letters}".strip()


def read_pair(gold: str, answer: str) -> tuple[ParsedAnswer, ParsedAnswer]:
    """Parse a gold answer and an answer. A letter after a number is read as a symbol if the other answer has symbols.

    Never raises. A text longer than `MAX_CHARS` is not split.
    """
    right, given = _read(gold), _read(answer)
    return _resolve_letters(right, given, is_gold=True), _resolve_letters(given, right, is_gold=False)


def _resolve_letters(one: ParsedAnswer, other: ParsedAnswer, *, is_gold: bool) -> ParsedAnswer:
    """Resolve whether the letters of one of a pair are symbols, a scale or a unit."""
    if not one.letters:
        return one
    is_symbol = _LETTER.search(_COMMAND.sub("", other.symbolic)) is not None
    if one.letters in SUFFIXES:
        if is_symbol or (is_gold and not one.unit):
            return replace(one, expression=one.symbolic, letters="")
        return replace(one, expression=_scaled(one.expression, SUFFIXES[one.letters]), letters="")
    if is_symbol or (is_gold and one.unit != other.unit):
        return ParsedAnswer(expression=one.symbolic)
    return replace(one, letters="")


def _read(text: str) -> ParsedAnswer:
    if len(text) > MAX_CHARS:
        return ParsedAnswer(expression=stripped(without_delimiters(text)))
    text = without_markup(text)
    bracket = _BRACKET.fullmatch(text)
    left, inner, right = bracket.groups() if bracket else ("", text, "")
    elements = _elements(inner)
    if len(elements) == 1 or not elements:
        return _measured(text)
    return replace(_listed(text, elements, left, right), container=left[-1:])


def _elements(text: str) -> list[str]:
    """Split a text at commas, `and` and `or` outside of brackets; returns [] if brackets do not match."""
    elements, depth, start, position = [], 0, 0, 0
    while position < len(text):
        separator = _SEPARATOR.match(text, position) if depth == 0 else None
        if separator:
            elements.append(text[start:position].strip())
            position = start = separator.end()
            continue
        depth += (text[position] in "([{") - (text[position] in ")]}")
        if depth < 0:
            return []
        position += 2 if text[position] == "\\" and text[position + 1 : position + 2] not in ("{", "}") else 1
    return [*elements, text[start:].strip()]


def _listed(text: str, elements: list[str], left: str, right: str) -> ParsedAnswer:
    """Parse a list, whose elements may share one unit."""
    values = [_measured(element) for element in elements]
    units = {value.unit for value in values if value.unit}
    has_units = any(value.expression != element for value, element in zip(values, elements, strict=True))
    if not has_units or len(units) > 1 or any(value.percent or value.letters for value in values):
        return ParsedAnswer(expression=text)
    inner = ", ".join(value.expression for value in values)
    return ParsedAnswer(expression=f"{left}{inner}{right}", unit=units.pop() if units else frozenset())


def _measured(text: str) -> ParsedAnswer:
    """Parse one value: its expression, the currency before it and the words after it."""
    currency = _CURRENCY.match(text)
    if currency:
        text = rf"{text[currency.end() :]} \text{{ {currency['text'] or currency['word']} }}"
    money: Unit = frozenset({("dollar", 1)}) if _MONEY.search(text) else frozenset()
    if money:
        text = _RATE.sub(r" per \1", _MONEY.sub("", text))
    parsed = _without_tail(stripped(text))
    return replace(parsed, unit=parsed.unit | money)


def _without_tail(text: str) -> ParsedAnswer:
    """Parse a value and the words after it, if they are a unit, a scale or a percent sign."""
    unread = ParsedAnswer(expression=text)
    text = _UNIT_FRACTION.sub(r"\1/\2", _IN_BRACKETS.sub(r" \1", text))
    tokens = list(_TOKEN.finditer(text))
    first = len(tokens)
    while first and tokens[first - 1].lastgroup != "other":
        first -= 1
    while first < len(tokens) and tokens[first].lastgroup not in _BEGINS_A_TAIL:
        first += 1
    tail = tokens[first:]
    expression = _GAP_AFTER.sub("", text[: tail[0].start()]) if tail else ""
    if not expression or _ENDS_OPEN.search(expression) or expression.count("(") != expression.count(")"):
        return unread
    is_glued = expression == text[: tail[0].start()]
    words, percent = _tail_words(tail)
    is_text = tail[0].lastgroup != "word"
    if is_glued and words in SUFFIXES and not is_text:
        return ParsedAnswer(expression=expression, letters=words)
    scale, words = _scale(words)
    unit = read_unit(words, is_text=is_text) if words else frozenset()
    is_number = _ENDS_A_NUMBER.search(expression) is not None
    is_counted = words and not unit and not is_text
    if unit is None or (scale > 1 and not is_number) or (is_counted and (is_glued or not is_number)):
        return unread
    return ParsedAnswer(
        expression=_scaled(expression, scale) if scale > 1 else expression,
        unit=unit,
        percent=percent,
        letters=words if not is_text and is_letter(words) and not percent and scale == 1 else "",
    )


def _tail_words(tail: list[re.Match[str]]) -> tuple[str, bool]:
    """Return the words of a tail, with powers as `^2` and degrees as `°`, and whether they contain a percent sign."""
    words = ""
    for token in tail:
        match token.lastgroup:
            case "text":
                inner = token[0].partition("{")[2][:-1].replace("~", " ")
                words += inner if inner.startswith(("/", "^")) else f" {inner}"
            case "degree":
                words += "°"
            case "power":
                words = f"{words.rstrip()}^{token[0].strip('^{} ')}"
            case "gap":
                words += " "
            case _:
                words += token[0]
    words, num_percent = _PERCENT_WORD.subn(" ", words)
    return " ".join(words.split()).strip(" ."), num_percent > 0


def _scale(words: str) -> tuple[int, str]:
    """Return the factor of the leading scale words, and the remaining words."""
    scale = 1
    while words:
        word, _, rest = words.partition(" ")
        if word.lower() not in SCALES:
            break
        scale, words = scale * SCALES[word.lower()], rest
    return scale, words


def _scaled(expression: str, scale: int) -> str:
    """Multiply the expression by a scale. A number stays a number, or it would look like unfinished work."""
    head, equals, number = expression.rpartition("=")
    product = Fraction(number) * scale if _DECIMAL.fullmatch(number.strip()) else None
    if product is not None and product.denominator == 1:
        return f"{head}{equals}{product}"
    return rf"{head}{equals}({number.strip()}) \cdot {scale}"
