r"""Normalization of math answers to LaTeX: removes markup and prose, and rewrites numbers.

Removes markdown, delimiters, boxes and sentences around an answer. Rewrites `1{,}000`, `0.\overline{3}`, `1.5e-7` and
typographic characters into LaTeX that Math-Verify's grammar reads.
"""

from __future__ import annotations

import re
import unicodedata

from rewards.parsing.boxed import last_boxed

TEXT = r"\\(?:text|textrm|textbf|textit|textnormal|textsf|mbox|hbox|mathrm|mathbf|mathit|mathsf|operatorname)\s*\{"
"""A regular expression for the start of a text group."""

_CHARACTERS = {
    "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u2010": "-", "\u2011": "-", "\u00d7": r"\times ",
    "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u2219": r"\cdot ", "\u2217": "*", "\u00f7": r"\div ", "\u2044": "/",
    "\u2215": "/", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u2248": r"\approx ", "\u00b1": r"\pm ",
    "\u221e": r"\infty ", "\u03c0": r"\pi ", "\u03b8": r"\theta ", "\u222a": r"\cup ", "\u2229": r"\cap ",
    "\u2208": r"\in ", "\u2205": r"\emptyset ", "\u211d": r"\mathbb{R}", "\u00b0": r"^\circ ", "\u00ba": r"^\circ ",
    "\uff05": "%", "\uff1d": "=", "\uff08": "(", "\uff09": ")", "\uff0c": ",", "\uff0e": ".", "\u00a0": " ",
    "\u2009": r"\,", "\u202f": r"\,", "\u200b": "", "\ufeff": "", "\u2032": "'", "\u2019": "'", "\u201c": '"',
    "\u201d": '"', "\u20ac": r"\text{ EUR }", "\u00a3": r"\text{ GBP }", "\u00a5": r"\text{ JPY }",
    "\u20b9": r"\text{ Rs }", "\u00a2": r"\text{ cents }", **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
}  # fmt: skip
_TRANSLATION = str.maketrans(_CHARACTERS)
_RAISED = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b"
_RAISED_RUN = re.compile(f"[{_RAISED}]+")
_PLAIN_DIGITS = str.maketrans(_RAISED, "0123456789+-")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e\u2189]")
_ROOT = re.compile(r"\u221a\s*([0-9]+(?:\.[0-9]+)?|[a-zA-Z]|\u03c0)?")
_COMBINED_BAR = re.compile("(?:[0-9]\u0305)+")
# Pairs of marks without a space inside and without an operand next to them.
_EMPHASIS = re.compile(r"(?<![\w)}\]*])(\*{1,3}|_{1,3}|~~|`{1,3})(?=[^\s*])([^*`\n]*[^\s*`])\1(?![\w({\[*])")
_TAG = re.compile(r"</?(?:b|strong|i|em|u|code|p)>")
# A Markdown quote mark, but not before a number or a root: `> 5` is an inequality.
_QUOTE = re.compile(r"^>\s+(?=[A-Za-z*_$`]|\\[(\[]|\\boxed)")
_FENCE = re.compile(r"```(?:math|latex|tex)?\n(.*?)\n?```", re.DOTALL)
_PYTHON_POWER = re.compile(r"(?<=[\w)}\]])\s*\*\*\s*(-?[\w.]+)?")
_DELIMITER = re.compile(r"\$\$|\\[()\[\]]")
_BARE_DOLLAR = re.compile(r"(?<!\\)\$")
_WRAPPER = re.compile(r"\\(?:boldsymbol|bm|underline|framebox|displaystyle|mathbf|textbf)\s*\{([^{}]*)\}")
_ROMAN_GROUP = re.compile(r"\{\\rm\s+([^{}]*)\}|\\rm\s*\{([^{}]*)\}")
_SAYS_NOTHING = re.compile(r"\\[hv]space\*?\{[^{}]*\}|\\(?:checkmark|blacksquare|square|qed)(?![a-zA-Z])|\\\\$")
_ANGLE = re.compile(r"\\([lr])angle(?![a-zA-Z])")
_ADVERBS = r"(?:(?:therefore|thus|then|exactly|simply|just|equal to|given by|approximately|about|a total of),? )*(?=\S)"
_PROSE = re.compile(
    r"(?:[A-Za-z][A-Za-z']*[ ,:]+)*?"
    rf"(?:(?:is|are|equals|be)(?:\s*:)?|[A-Za-z]{{2,}}\s*:|(?:final )?answer(?! is| are))\s+{_ADVERBS}",
    re.IGNORECASE,
)
_ANSWER_WORD = re.compile(r"\b(?:answer|result|solution)\b", re.IGNORECASE)
_BEHIND = re.compile(r"\s+is (?:the|our|my) (?:final |correct |right )?answer$", re.IGNORECASE)
_PICTURES = re.compile("^[\u2600-\u27bf\U0001f000-\U0001faff\ufe0f\\s]+")
_LEADING = re.compile(
    r"(?:(?:therefore|thus|so|hence|then|finally|we get|we have|and)[,:]?\s+|(?:=|\\approx)\s*|#+\s+)+", re.I
)
_TEXT_PROSE = re.compile(
    rf"{TEXT}([^{{}}]*\b(?:is|are|answer|equals)\s*:?\s*|[A-Za-z ]*:\s*)\}}\s*(?=\S)", re.IGNORECASE
)
_ALL_TEXT = re.compile(rf"{TEXT}\s*(-?[0-9.$\\][^{{}}]*|[A-Z](?:,\s*[A-Z])+)\s*\}}")
_TEXT_NUMBER = re.compile(rf"{TEXT}\s*(-?[0-9][0-9,.]*)\s*\}}")
_ORDINAL = re.compile(
    r"(?<=[0-9])(?:\^\s*\{?\s*)?(?:\\text\s*\{\s*|\\mathrm\s*\{\s*)?(?:st|nd|rd|th)(?![a-zA-Z])[\s}]*$"
)

# The grammar misreads these: primes are dropped, `0x1F` is 0, and `\mathbb R` is not a set.
_PRIMES = re.compile(r"(?<=[A-Za-z)}])(?:'+(?![a-z])|\^\s*\{?\s*(?:\\prime\s*)+\}?)")
_MARK = re.compile(r"(?<=[0-9])'\s*(?=[0-9])")
_BASES = {"x": 16, "o": 8, "b": 2}
_PREFIXED = re.compile(r"(?<![\w.])0([xob])([0-9a-fA-F]+)(?![\w.])")
_BLACKBOARD = re.compile(r"\\mathbb\s+([A-Z])")

_FRACTION = re.compile(r"\\[dtc]?frac(?![a-zA-Z])\s*")
_NUMERATOR = re.compile(r"(\\frac)([0-9a-zA-Z]|\\(?:pi|theta)(?![a-zA-Z]))\s*")
_DENOMINATOR = re.compile(r"(\\frac\{[^{}]*\})\s*([0-9a-zA-Z]|\\(?:pi|theta)(?![a-zA-Z]))")
_EXPONENT = re.compile(r"\^\s*(-?[0-9]+(?![0-9]))")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])([0-9]+)(?:\.([0-9]+))?[eE]([-+]?[0-9]+)(?![\w.])")
_TIMES_TEN = re.compile(r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)")
_MIXED = re.compile(r"(?<![\w/.^}])([0-9]+) +([0-9]+) ?/ ?([0-9]+)(?![\w/.^])")
_BAR = r"\\(?:overline|bar)\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))"
_DOTS = r"\\dot\s*\{?([0-9])\}?(?:([0-9]*)\\dot\s*\{?([0-9])\}?)?"
_REPEATING = re.compile(rf"([0-9]*)\.([0-9]*)(?:{_BAR}|{_DOTS}|\(([0-9]+)\)(?![0-9]))")
_GOES_ON = re.compile(
    r"(?<![\w.])([0-9]*)\.([0-9]{0,20}?)(?:([0-9]{1,20}?)\3{2,}|([0-9]{2,20}?)\4+)\s*(?:\\[lc]?dots(?![a-zA-Z])|\u2026|\.\.\.)"
)
_SPACED = re.compile(r"(?<![\w.,])([1-9][0-9]{0,2})((?:(?:\{,\}|\\[,!:;]|,\\!|\{\\,\})\s*[0-9]{3})+)(?![0-9])")
_WHOLE_SPACED = re.compile(r"(-?\s*[1-9][0-9]{0,2})((?:[ '][0-9]{3})+)(\.[0-9]+)?(?![0-9])")
_THOUSANDS = re.compile(r"(?<![\w.,])([1-9][0-9]{0,2})((?:,[0-9]{3})+)(?![0-9,])")
_DIGIT = re.compile(r"[0-9]")
_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])\s*(?:\^\s*\{?-?[0-9]+\}?)?\s*(?:\\left)?[({]?\s*)(-?[0-9]+(?:\.[0-9]+)?)"
    r"\s*(?:\^\s*\{?\s*\\circ(?![a-zA-Z])\s*\}?|\\degree(?![a-zA-Z]))"
)


def without_markup(text: str) -> str:
    """Return the LaTeX of an answer, with numbers in a uniform notation."""
    return _numbers(unwrapped(text))


def unwrapped(text: str) -> str:
    """Return the LaTeX of an answer, with numbers as they are written."""
    return _without_prose(_unmarked(_characters(_last_said(text))))


def stripped(text: str) -> str:
    """Return the text on one line, without outer white space and trailing punctuation."""
    return " ".join(text.split()).rstrip(" .,;:").strip()


def without_delimiters(text: str) -> str:
    """Return the text without LaTeX's math delimiters. A single dollar sign is money."""
    text = _DELIMITER.sub(" ", text)
    is_money = len(_BARE_DOLLAR.findall(text)) == 1
    return _BARE_DOLLAR.sub(r"\\$" if is_money else " ", text)


def _last_said(text: str) -> str:
    """Return the text from the last line that mentions the answer (all of it if none does), without leading
    pictographs."""
    lines = [line for line in text.splitlines() if line.strip()]
    places = [place for place, line in enumerate(lines) if _ANSWER_WORD.search(line)]
    return _PICTURES.sub("", "\n".join(lines[places[-1] :]) if len(lines) > 1 and places else text)


def _characters(text: str) -> str:
    """Replace typographic characters by LaTeX commands."""
    text = _GOES_ON.sub(lambda number: rf"{number[1]}.{number[2]}\overline{{{number[3] or number[4]}}}", text)
    text = _COMBINED_BAR.sub(lambda bar: rf"\overline{{{bar[0].replace(chr(0x305), '')}}}", text)
    text = _VULGAR.sub(
        lambda sign: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", sign[0]).split("\u2044")), text
    )
    text = _RAISED_RUN.sub(lambda run: f"^{{{run[0].translate(_PLAIN_DIGITS)}}}", text)
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1]}}}" if root[1] else r"\sqrt", text)
    return text.translate(_TRANSLATION).replace(r"\{\,}", ",").replace("{.}", ".")


def _unmarked(text: str) -> str:
    """Remove markdown, delimiters and the box around the text."""
    text = _QUOTE.sub("", _FENCE.sub(r"\1", text))
    text = _without_emphasis(_TAG.sub("", text))
    text = _without_emphasis(without_delimiters(text))
    num_boxes = text.count(r"\boxed") + text.count(r"\fbox")
    if num_boxes == 1 or text.startswith((r"\boxed{\boxed", r"\boxed{\fbox")):
        text = last_boxed(text) or text
    text = _ROMAN_GROUP.sub(lambda group: rf"\text{{{group[1] or group[2]}}}", text)
    text = _ANGLE.sub(lambda angle: "(" if angle[1] == "l" else ")", _SAYS_NOTHING.sub(" ", text))
    wrapped = _WRAPPER.fullmatch(text)
    text = stripped(wrapped[1] if wrapped else text)
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = stripped(text[1:-1])
    return _PYTHON_POWER.sub(lambda power: f"^{{{power[1]}}}" if power[1] else "^", text)


def _without_emphasis(text: str) -> str:
    while (plain := stripped(_EMPHASIS.sub(r"\2", text))) != text:
        text = plain
    return text


def _without_prose(text: str) -> str:
    """Remove a sentence around the answer, and a text group around its number."""
    text = _BEHIND.sub("", _TEXT_PROSE.sub("", text, count=1) if _TEXT_PROSE.match(text) else text)
    text = _without_leading(text)
    prose = _PROSE.match(text)
    if prose and (_DIGIT.search(text[prose.end() :]) or _ANSWER_WORD.search(prose[0])):
        text = _without_leading(text[prose.end() :])
    whole = _ALL_TEXT.fullmatch(text)
    return stripped(_TEXT_NUMBER.sub(r"\1", whole[1] if whole else text))


def _without_leading(text: str) -> str:
    leading = _LEADING.match(text)
    return text[leading.end() :] if leading else text


def _numbers(text: str) -> str:
    text = _SPACED.sub(lambda number: number[1] + re.sub(r"[^0-9]", "", number[2]), text)
    text = _ORDINAL.sub("", _without_commas(text))
    text = _PRIMES.sub(_primes, _BLACKBOARD.sub(r"\\mathbb{\1}", text))
    text = _MARK.sub(r" \\text{ feet } ", text)
    text = _PREFIXED.sub(lambda number: f"{number[2].upper()}_{{{_BASES[number[1]]}}}", text)
    text = _FRACTION.sub(r"\\frac", _TIMES_TEN.sub(r" \\times ", text))
    text = _DENOMINATOR.sub(r"\1{\2}", _NUMERATOR.sub(r"\1{\2}", text))
    text = _SCIENTIFIC.sub(_scientific, _REPEATING.sub(_repeating, text))
    text = _DEGREES.sub(r"\1(\2 \\cdot \\frac{\\pi}{180})", text)
    return _EXPONENT.sub(r"^{\1}", _MIXED.sub(r"\1\\frac{\2}{\3}", text))


def _without_commas(text: str) -> str:
    """Remove thousands separators. Between brackets a comma separates elements."""
    if not any(bracket in text for bracket in ("(", "[", r"\{")):
        text = _THOUSANDS.sub(lambda number: number[1] + number[2].replace(",", ""), text)
    head, equals, number = text.rpartition("=")
    spaced = _WHOLE_SPACED.match(number.strip())
    rest = number.strip()[spaced.end() :] if spaced else ""
    if spaced and not _DIGIT.search(rest):
        return f"{head}{equals}{spaced[1]}{re.sub('[^0-9]', '', spaced[2])}{spaced[3] or ''}{rest}"
    return text


def _primes(found: re.Match[str]) -> str:
    """Rewrite primes as an index: `f'` is a different function from `f`."""
    num_primes = found[0].count("'") + found[0].count(r"\prime")
    return "_{" + r"\prime" * num_primes + "}"


def _repeating(number: re.Match[str]) -> str:
    """Rewrite a repeating decimal as a fraction."""
    whole, fixed = number[1], number[2]
    repeated = number[3] or number[4] or number[8] or f"{number[5]}{number[6] or ''}{number[7] or ''}"
    above = int(f"{whole}{fixed}{repeated}") - int(f"{whole}{fixed}" or "0")
    return rf"\frac{{{above}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


def _scientific(number: re.Match[str]) -> str:
    """Rewrite a number like `1.5e-7` as a fraction."""
    digits, power = f"{number[1]}{number[2] or ''}", int(number[3]) - len(number[2] or "")
    return rf"\frac{{{digits}}}{{10^{{{-power}}}}}" if power < 0 else rf"\frac{{{digits} \cdot 10^{{{power}}}}}{{1}}"
