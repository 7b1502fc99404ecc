r"""An answer as people and models write it, taken apart: the expression, its unit, and nothing of the markup round it."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace

from rewards.maths.units import SCALES, SUFFIXES, Unit, is_letter, read_unit
from rewards.reading.boxed import last_boxed


MAX_CHARS = 2000
"""Longer texts are not taken apart. It bounds the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What an answer says."""

    expression: str
    """LaTeX without markup, units and words round it."""
    unit: Unit = frozenset()
    """The measures behind the number."""
    percent: bool = False
    """Whether a percent sign stands behind the expression."""
    letters: str = ""
    """One or two letters behind the number, which are a unit or a scale, or symbols that belong to the expression."""

    @property
    def symbolic(self) -> str:
        """The expression with its letters as symbols."""
        return f"{self.expression} {self.letters}".strip()


_CHARACTERS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "∗": "*", "÷": r"\div ", "⁄": "/", "∕": "/", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ",
    "∞": r"\infty ", "π": r"\pi ", "θ": r"\theta ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}", "°": r"^\circ ", "º": r"^\circ ", "％": "%", "＝": "=", "（": "(", "）": ")", "，": ",", "…": r"\ldots ",
    "\u00a0": " ", "\u2009": r"\,", "\u202f": r"\,", "\u200b": "", "\ufeff": "", "′": "'", "’": "'", "€": r"\text{ EUR }",
    "£": r"\text{ GBP }", "¥": r"\text{ JPY }", "₹": r"\text{ Rs }", "¢": r"\text{ cents }",
}  # fmt: skip
_TRANSLATION = str.maketrans(_CHARACTERS)
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
_RAISED_RUN = re.compile(f"[{_RAISED}]+")
_PLAIN_DIGITS = str.maketrans(_RAISED, "0123456789+-")
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")
_ROOT = re.compile(r"√\s*(\d+(?:\.\d+)?|[a-zA-Z]|\\pi)?")
# Emphasis and code of markdown: pairs with no space within and no operand beside them.
_EMPHASIS = re.compile(r"(?<![\w)}\]*])(\*{1,3}|_{2,3}|~~|`{1,3})(?=[^\s*])([^*`\n]*[^\s*`])\1(?![\w({\[*])")
_PYTHON_POWER = re.compile(r"(?<=[\w)}\]])\s*\*\*\s*(-?[\w.]+)?")
_DELIMITER = re.compile(r"\$\$|\\[()\[\]]")
_MONEY = re.compile(r"(?:US)?\\\$")
_LATEX_SPACE_BEHIND = re.compile(r"(?:\s|~|\\(?:[,;:! ]|quad(?![a-zA-Z])|qquad(?![a-zA-Z])|cdot(?![a-zA-Z])))+$")
_FRACTION = re.compile(r"\\[dtc]?frac(?![a-zA-Z])\s*")
_NUMERATOR = re.compile(r"(\\frac)([0-9a-zA-Z]|\\(?:pi|theta)(?![a-zA-Z]))\s*")
_DENOMINATOR = re.compile(r"(\\frac\{[^{}]*\})\s*([0-9a-zA-Z]|\\(?:pi|theta)(?![a-zA-Z]))")
_EXPONENT = re.compile(r"\^\s*(-?[0-9]+(?![0-9]))")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])([0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]+)(?![\w.])")
_MIXED = re.compile(r"(?<![\w/.^}])([0-9]+) +([0-9]+) ?/ ?([0-9]+)(?![\w/.^])")
_BAR = r"\\(?:overline|bar)\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))"
_DOTS = r"\\dot\s*\{?([0-9])\}?(?:([0-9]*)\\dot\s*\{?([0-9])\}?)?"
_REPEATING = re.compile(rf"([0-9]*)\.([0-9]*)(?:{_BAR}|{_DOTS}|\(([0-9]+)\)(?![0-9]))")
_GOES_ON = re.compile(r"(?<![\w.])([0-9]*)\.([0-9]*?)([0-9]+?)\3{2,}\s*(?:\\(?:l|c)?dots|\.\.\.)")
_COMBINED_BAR = re.compile("(?:[0-9]\u0305)+")
_SPACED = re.compile(r"(?<![\w.,])([1-9][0-9]{0,2})((?:(?:\{,\}|\\[,!:;]|,\\!|\{\\,\})\s*[0-9]{3})+)(?![0-9])")
_WHOLE_SPACED = re.compile(r"(-?\s*[1-9][0-9]{0,2})((?:[ '][0-9]{3})+)(\.[0-9]+)?")
_THOUSANDS = re.compile(r"(?<![\w.,])([1-9][0-9]{0,2})((?:,[0-9]{3})+)(?![0-9,])")
_PROSE = re.compile(
    r"(?:[A-Za-z][A-Za-z']*[ ,:]+)*?(?:(?:is|are|equals|be)(?:\s*:)?|[A-Za-z]{2,}\s*:|(?:final )?answer(?! is| are))\s+"
    r"(?:(?:therefore|thus|then|exactly|simply|just|equal to|given by|approximately|about|a total of),? )*(?=\S)",
    re.IGNORECASE,
)
_LEADING = re.compile(r"(?:(?:therefore|thus|so|hence|then|finally|we get|we have|and)[,:]?\s+|=\s*|>\s+|#+\s+)+", re.I)
_TEXT = r"\\(?:text|textrm|textbf|textit|textnormal|textsf|mbox|hbox|mathrm|mathbf|mathit|mathsf|operatorname)\s*\{"
_ALL_TEXT = re.compile(rf"{_TEXT}\s*(-?[0-9.$\\][^{{}}]*)\}}")
_TEXT_NUMBER = re.compile(rf"{_TEXT}\s*(-?[0-9][0-9,.]*)\s*\}}")
_UNIT_FRACTION = re.compile(rf"\\frac\{{\s*({_TEXT}[^{{}}]*\}})\s*\}}\{{\s*({_TEXT}[^{{}}]*\}})\s*\}}$")
_TOKEN = re.compile(
    rf"(?P<text>{_TEXT}[^{{}}]*\}})|(?P<degree>\^\s*\{{?\s*\\circ(?![a-zA-Z])\s*\}}?|\\degree(?![a-zA-Z]))"
    r"|(?P<power>\^\s*(?:\{\s*-?[0-9]\s*\}|-?[0-9]))|(?P<percent>\\?%)|(?P<command>\\(?:[a-zA-Z]+|.))"
    r"|(?P<word>[A-Za-z]+(?:\.[A-Za-z]+)*)|(?P<digits>[0-9.,]+)|(?P<link>\s+|[./*'()-])|(?P<other>.)",
    re.DOTALL,
)
_UNIT_TOKENS = frozenset({"text", "degree", "power", "percent", "word", "link"})
_FIRST_TOKENS = frozenset({"text", "degree", "percent", "word"})
_ENDS_A_NUMBER = re.compile(r"(?:[0-9)}\]!]|\\(?:pi|infty))$")
_ENDS_OPEN = re.compile(r"(?:[-+*/^_=<>,;:({\[&|]|\\(?:cdot|times|div|pm|le|ge|ne|in|cup|cap|frac|sqrt|to|mid|sin|cos|tan|log|ln))$")
_PERCENT_WORD = re.compile(r"\b(?:percent|percentage|per cent|pct)\b\.?")
_DIGIT = re.compile(r"[0-9]")
_SEPARATOR = re.compile(r",\s*(?:\\text\s*\{\s*(?:and|or)\s*\}|(?:and|or)(?![a-zA-Z]))?|\\text\s*\{\s*(?:and|or)\s*\}|;|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])")


def read(text: str) -> Written:
    """Take an answer apart. Never raises; what is longer than `MAX_CHARS` is taken as it is."""
    if len(text) > MAX_CHARS:
        return Written(expression=_stripped(_DELIMITER.sub(" ", text)))
    text = _unmarked(text)
    text = _numbers(_without_prose(text))
    elements = _elements(text)
    if len(elements) > 1:
        return _listed(text, elements)
    return _measured(text)


def _unmarked(text: str) -> str:
    """The text as LaTeX: without markdown, delimiters of mathematics and the box."""
    text = _COMBINED_BAR.sub(lambda bar: rf"\overline{{{bar[0].replace(chr(0x305), '')}}}", text)
    text = _VULGAR.sub(lambda sign: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", sign[0]).split("⁄")), text)
    text = _RAISED_RUN.sub(lambda run: f"^{{{run[0].translate(_PLAIN_DIGITS)}}}", text)
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1]}}}" if root[1] else r"\sqrt", text).translate(_TRANSLATION)
    text = _GOES_ON.sub(r"\1.\2\\overline{\3}", text)
    text = _without_emphasis(text.replace(r"\{\,}", ","))
    text = _DELIMITER.sub(" ", text)
    # A lone dollar sign is money; two are the bounds of mathematics.
    bare = re.findall(r"(?<!\\)\$", text)
    text = re.sub(r"(?<!\\)\$", r"\\$" if len(bare) == 1 else " ", text)
    text = _without_emphasis(text)
    if text.count(r"\boxed") + text.count(r"\fbox") == 1 or text.startswith((r"\boxed{\boxed", r"\boxed{\fbox")):
        text = last_boxed(text) or text
    return _PYTHON_POWER.sub(lambda power: f"^{{{power[1]}}}" if power[1] else "^", text)


def _without_emphasis(text: str) -> str:
    while (plain := _stripped(_EMPHASIS.sub(r"\2", text))) != text:
        text = plain
    return text


def _stripped(text: str) -> str:
    return " ".join(text.split()).rstrip(" .,;:").strip()


def _without_prose(text: str) -> str:
    text = _LEADING.sub("", text, count=1) if _LEADING.match(text) else text
    prose = _PROSE.match(text)
    if prose and _DIGIT.search(text[prose.end() :]):
        text = text[prose.end() :]
    whole = _ALL_TEXT.fullmatch(text)
    return _stripped(_TEXT_NUMBER.sub(r"\1", whole[1] if whole else text))


def _numbers(text: str) -> str:
    """The text with every number in one spelling of LaTeX."""
    text = _SPACED.sub(lambda number: number[1] + re.sub(r"[^0-9]", "", number[2]), text)
    text = _without_commas(text)
    text = _FRACTION.sub(r"\\frac", text)
    text = _DENOMINATOR.sub(r"\1{\2}", _NUMERATOR.sub(r"\1{\2}", text))
    text = _REPEATING.sub(_repeating, text)
    text = _SCIENTIFIC.sub(r"(\1 \\cdot 10^{\2})", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    return _EXPONENT.sub(r"^{\1}", text)


def _without_commas(text: str) -> str:
    """Without the commas between thousands, where no other comma stands as near to a number."""
    if not any(bracket in text for bracket in ("(", "[", r"\{")):
        text = _THOUSANDS.sub(lambda number: number[1] + number[2].replace(",", ""), text)
    head, equals, number = text.rpartition("=")
    spaced = re.match(_WHOLE_SPACED, number.strip())
    if spaced and not _DIGIT.search(number.strip()[spaced.end() :]):
        rest = number.strip()[spaced.end() :]
        return f"{head}{equals}{spaced[1]}{re.sub('[^0-9]', '', spaced[2])}{spaced[3] or ''}{rest}"
    return text


def _repeating(number: re.Match[str]) -> str:
    """A repeating decimal as a fraction."""
    whole, fixed = number[1], number[2]
    repeated = number[3] or number[4] or number[8] or f"{number[5]}{number[6] or ''}{number[7] or ''}"
    above = int(f"{whole}{fixed}{repeated}") - int(f"{whole}{fixed}" or "0")
    return rf"\frac{{{above}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


def _elements(text: str) -> list[str]:
    """What stands between commas, `and` and `or` outside of brackets."""
    elements, depth, start = [], 0, 0
    position = 0
    while position < len(text):
        separator = _SEPARATOR.match(text, position) if depth == 0 else None
        if separator:
            elements.append(text[start : position])
            position = start = separator.end()
            continue
        depth += (text[position] in "([{") - (text[position] in ")]}")
        position += 2 if text[position] == "\\" and text[position + 1 : position + 2] not in tuple("{}") else 1
    return [*elements, text[start:]]


def _listed(text: str, elements: list[str]) -> Written:
    """A list, whose elements may have one unit in common."""
    read_ones = [_measured(element.strip()) for element in elements]
    units = {one.unit for one in read_ones} - {frozenset()}
    is_plain = all(one.expression == element.strip() for one, element in zip(read_ones, elements, strict=True))
    if is_plain or len(units) > 1 or any(one.percent or one.letters for one in read_ones):
        return Written(expression=text)
    return Written(expression=", ".join(one.expression for one in read_ones), unit=next(iter(units), frozenset()))


def _measured(text: str) -> Written:
    """One value, taken apart into its expression and what stands behind and before it."""
    money = _MONEY.search(text)
    text = _stripped(_MONEY.sub("", text))
    symbol: Unit = frozenset({("dollar", 1)}) if money else frozenset()
    written = _with_tail(text)
    if symbol and written.unit and written.unit != symbol and not symbol <= written.unit:
        return Written(expression=text, unit=symbol)
    return replace(written, unit=written.unit | symbol)


def _with_tail(text: str) -> Written:
    unread = Written(expression=text)
    prefix = re.match(rf"{_TEXT}\s*(EUR|GBP|JPY|Rs|USD)\.?\s*\}}\s*(?=[0-9])", text)
    if prefix:
        text = f"{text[prefix.end() :]} {prefix[0]}"
    fraction = _UNIT_FRACTION.search(text)
    if fraction:
        text = f"{text[: fraction.start()]}{fraction[1]}/{fraction[2]}"
    tokens = list(_TOKEN.finditer(text))
    first = len(tokens)
    while first and (tokens[first - 1].lastgroup in _UNIT_TOKENS or tokens[first - 1][0] in (r"\,", r"\ ", r"\cdot", r"\;")):
        first -= 1
    while first < len(tokens) and tokens[first].lastgroup not in _FIRST_TOKENS:
        first += 1
    if first == len(tokens):
        return unread
    expression, tail = text[: tokens[first].start()], tokens[first:]
    expression = _LATEX_SPACE_BEHIND.sub("", expression)
    if not expression or _ENDS_OPEN.search(expression):
        return unread
    if expression.count("(") != expression.count(")"):
        return unread
    is_glued = tokens[first].start() > 0 and not text[tokens[first].start() - 1].isspace()
    return _tail_read(unread, expression, tail, is_glued=is_glued)


def _tail_read(unread: Written, expression: str, tail: list[re.Match[str]], *, is_glued: bool) -> Written:
    words, is_text = "", tail[0].lastgroup != "word"
    percent = any(token.lastgroup == "percent" for token in tail)
    for token in tail:
        match token.lastgroup:
            case "text":
                inner = token[0].partition("{")[2][:-1]
                words += f" {re.sub(r'[$]|[0-9](?=[0-9])', ' ', inner)} " if not inner.strip().startswith(("^", "/")) else inner
            case "degree":
                words += "°"
            case "power":
                words = words.rstrip() + "^" + re.sub(r"[\^{}\s]", "", token[0])
            case "percent":
                words += " "
            case "command":
                words += " "
            case _:
                words += token[0]
    words, num_percent = _PERCENT_WORD.subn(" ", words)
    percent = percent or num_percent > 0
    is_number = _ENDS_A_NUMBER.search(expression) is not None
    stripped = words.strip(" .")
    if not is_text and len(tail) == 1 and is_glued and stripped in SUFFIXES:
        return Written(expression=expression, letters=stripped)
    scale = 1
    while stripped:
        word, _, rest = stripped.partition(" ")
        if word.lower() not in SCALES:
            break
        scale, stripped = scale * SCALES[word.lower()], rest.strip()
        is_text = is_text or bool(stripped)
    unit = read_unit(stripped, is_text=is_text) if stripped else frozenset()
    if unit is None or ((not is_number or is_glued) and not is_text and not unit):
        if not percent and scale == 1 or stripped:
            return unread
        unit = frozenset()
    if scale > 1:
        if not is_number:
            return unread
        expression = _scaled(expression, scale)
    if not is_text and is_letter(stripped) and not percent and scale == 1:
        return Written(expression=expression, unit=unit, letters=stripped)
    return Written(expression=expression, unit=unit, percent=percent)


def _scaled(expression: str, scale: int) -> str:
    head, equals, number = expression.rpartition("=")
    return rf"{head}{equals}({number.strip()}) \cdot {scale}"


_COMMAND = re.compile(r"\\[a-zA-Z]+")
_LETTER = re.compile(r"[a-zA-Z]")


def read_pair(gold: str, answer: str) -> tuple[Written, Written]:
    """A gold answer and an answer, taken apart. A letter behind a number is a symbol where the other one has symbols."""
    right, given = read(gold), read(answer)
    return _settled(right, given, is_gold=True), _settled(given, right, is_gold=False)


def _settled(one: Written, other: Written, *, is_gold: bool) -> Written:
    if not one.letters:
        return one
    is_symbol = _LETTER.search(_COMMAND.sub("", other.symbolic)) is not None
    if one.letters in SUFFIXES and not one.unit:
        if is_symbol:
            return Written(expression=one.symbolic)
        return Written(expression=_scaled(one.expression, SUFFIXES[one.letters]))
    if is_symbol or (is_gold and one.unit != other.unit):
        return Written(expression=one.symbolic)
    return replace(one, letters="")
