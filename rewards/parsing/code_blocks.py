"""Fenced code blocks of Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# Quote marks and list markers, then spaces and the fence. A fence that opens a Python block may also follow words.
_OPENING = re.compile(
    r"(?P<within>^\ufeff?(?:[ \t]*+(?:>|(?:[-*+]|[0-9]{1,9}[.)])(?=[ \t])))*+[ \t]*+"
    r"|(?<=[^\s`])[ \t]?(?=```(?:python|py)[0-9]?[ \t]*$))"
    r"(?P<fence>(?P<mark>`)``+|(?:~)~~+)(?P<info>(?(mark)[^`\n]*|[^\n]*))$",
    re.MULTILINE,
)
_FENCE = r"^[ \t>]*(?P<fence>`{3,}+|~{3,}+)[ \t]*(?P<info>[^\s`<][^`\n]*)?(?:<[^\n]*)?$"
_CLOSING = re.compile(_FENCE, re.MULTILINE)
# Atomic groups instead of possessive quantifiers, which Python 3.11.2 matches wrongly around alternatives (gh-106052).
# Closed strings, comments, unclosed strings, and fences, which count only outside of strings.
_PYTHON_LEXEME = re.compile(
    r'"""(?>(?:[^"\\]|\\.|"(?!""))*)"""'
    r"|'''(?>(?:[^'\\]|\\.|'(?!''))*)'''"
    r'|"(?!"")(?>(?:[^"\\\n]|\\.)*)"'
    r"|'(?!'')(?>(?:[^'\\\n]|\\.)*)'"
    r"|#[^\n]*+"
    r"|(?P<unclosed>\"\"\"|''')|" + _FENCE,
    re.MULTILINE | re.DOTALL,
)
_OUTSIDE_QUOTE = re.compile(r"^(?![ \t]*>)", re.MULTILINE)
_QUOTE_MARKS = re.compile(r"^(?:[ \t]*> ?)+", re.MULTILINE)
_LINE_END = re.compile(r"\r\n?")
_PYTHON = re.compile(r"\{?\s*\.?i?py(?:thon)?[0-9.]*(?![\w-])", re.IGNORECASE)
_TRANSPARENT = re.compile(r"\{?\s*\.?(?:markdown|md)(?![\w-])", re.IGNORECASE)

# Limit on the blocks with an unclosed string. After that, strings are no longer recognised, which bounds the time.
_MAX_REREADINGS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeBlock:
    """A fenced block."""

    info: str
    """The text after the opening fence: the language, and perhaps more."""
    code: str
    """Its content, without the indentation and the quote marks of the fence."""
    is_closed: bool
    """Whether a fence closes it; otherwise it ends with the text or the quote that it is in."""

    @property
    def is_python(self) -> bool:
        """Whether its info string names Python."""
        return _PYTHON.match(self.info) is not None


def code_blocks(text: str) -> Iterator[CodeBlock]:
    """Yield the fenced blocks of a text, in order. Takes time linear in the text.

    Fences follow CommonMark, except that they may be indented by any amount, and lines may be indented less than their
    fence. In a block of Python, or without a language, a fence inside a string (as in docstrings) does not close the
    block, and a fence that names a language ends it and opens the next one. A fence that names Markdown is ignored, so
    that the blocks inside it are found.
    """
    text = _LINE_END.sub("\n", text)
    place = quote_end = num_rereadings = 0
    while opening := _OPENING.search(text, place):
        info, start = opening["info"].strip(), min(opening.end() + 1, len(text))
        place = start
        if _TRANSPARENT.match(info):
            continue
        stop = len(text)
        if ">" in opening["within"]:
            # Searched once per quote, not once per block of it.
            stop = quote_end = quote_end if start < quote_end else _quote_end(text, start)
        is_code = not info or _PYTHON.match(info)
        if is_code and num_rereadings < _MAX_REREADINGS:
            closing = _closing_outside_strings(text, start, stop, opening["fence"])
            num_rereadings += closing is not None and closing.re is _CLOSING
        else:
            closing = _closing(text, start, stop, opening["fence"], reopens=bool(is_code))
        end = closing.start() if closing else stop
        yield CodeBlock(info=info, code=_unindented(text[start:end], opening["within"]), is_closed=closing is not None)
        place = end if closing is None or closing["info"] else closing.end()


def _quote_end(text: str, start: int) -> int:
    end = _OUTSIDE_QUOTE.search(text, start)
    return end.start() if end else len(text)


def _closing(text: str, start: int, stop: int, fence: str, *, reopens: bool) -> re.Match[str] | None:
    """Return the first fence that closes a block. With `reopens`, a fence that names a language also closes it."""
    found = (found for found in _CLOSING.finditer(text, start, stop) if found["fence"].startswith(fence))
    return next((closing for closing in found if reopens or not closing["info"]), None)


def _closing_outside_strings(text: str, start: int, stop: int, fence: str) -> re.Match[str] | None:
    """Return the first fence that closes a block of Python and is outside its strings. If a string stays open, any
    fence counts."""
    for lexeme in _PYTHON_LEXEME.finditer(text, start, stop):
        if lexeme["unclosed"]:
            return _closing(text, start, stop, fence, reopens=True)
        if lexeme["fence"] and lexeme["fence"].startswith(fence):
            return lexeme
    return None


def _unindented(code: str, within: str) -> str:
    """Return the code without its fence's quote marks and at most the fence's indentation (less if its first line has
    less)."""
    if ">" in within:
        code, within = _QUOTE_MARKS.sub("", code), within.rpartition(">")[2].removeprefix(" ")
    first = next((line for line in code.split("\n") if line.strip()), "")
    width = min(_width(within), _width(first[: len(first) - len(first.lstrip(" \t"))]))
    return "\n".join(_cut(line, width) for line in code.split("\n")) if width else code


def _width(text: str) -> int:
    return len(text.expandtabs(4))


def _cut(line: str, width: int) -> str:
    """Remove the first `width` columns of a line as far as they are white space."""
    bare = line.lstrip(" \t")
    return " " * (_width(line[: len(line) - len(bare)]) - width) + bare
