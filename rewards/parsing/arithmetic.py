"""Exact and bounded evaluation of arithmetic expressions in completions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

Operator = Literal["+", "-", "*", "/"]

MAX_EXPRESSION_CHARS = 256
"""Longer texts are rejected, which bounds the numbers, the nesting and the time. Countdown's longest demonstrations
have 40 characters."""

_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_SYMBOL = re.compile(r"[ \t]*([0-9]+|[-+*/()])")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedExpression:
    """An arithmetic expression: its value, numbers and operators."""

    value: Fraction
    """Its exact value."""
    numbers: tuple[int, ...]
    """The numbers written in it, from left to right, with repetitions."""
    operators: frozenset[str]
    """The operators written in it: a subset of + - * /."""


def evaluate(text: str) -> EvaluatedExpression | None:
    """Evaluate non-negative decimal integers joined by binary + - * / and parentheses; None for anything else.

    None for: an empty or malformed text, more than `MAX_EXPRESSION_CHARS` characters, a division by zero, signs (`-3`),
    `**`, `//`, decimal points, leading zeros (`07`), implied products (`2(3)`), non-ASCII digits, and whitespace other
    than spaces and tabs. Never raises.
    """
    symbols = _symbols(text)
    if symbols is None:
        return None
    parser = _Parser()
    try:
        for symbol in symbols:
            parser.read(symbol)
        value = parser.finish()
    except (_MalformedError, ZeroDivisionError):
        return None
    return EvaluatedExpression(
        value=value,
        numbers=tuple(int(symbol) for symbol in symbols if symbol[0].isdecimal()),
        operators=frozenset(symbols).intersection(_PRECEDENCE),
    )


class _MalformedError(Exception):
    """The symbols do not form an expression."""


def _symbols(text: str) -> list[str] | None:
    """Return the symbols of a text; None if it is too long or has a character that no expression has."""
    text = text.strip(" \t")
    if len(text) > MAX_EXPRESSION_CHARS:
        return None
    symbols: list[str] = []
    position = 0
    while position < len(text):
        match = _SYMBOL.match(text, position)
        if match is None:
            return None
        symbols.append(match.group(1))
        position = match.end()
    return symbols


@dataclass(slots=True)
class _Parser:
    """Dijkstra's shunting-yard algorithm. It does not recurse, so nested parentheses use no call stack."""

    _values: list[Fraction] = field(default_factory=list)
    _pending: list[str] = field(default_factory=list)
    _wants_operand: bool = True

    def read(self, symbol: str) -> None:
        """Consume the next symbol. Raises _MalformedError if it is not allowed here, ZeroDivisionError on division by
        zero."""
        if self._wants_operand:
            self._read_operand(symbol)
        elif symbol == ")":
            self._reduce(above=0)
            if not self._pending:
                raise _MalformedError
            self._pending.pop()
        elif symbol in _PRECEDENCE:
            self._reduce(above=_PRECEDENCE[symbol])
            self._pending.append(symbol)
            self._wants_operand = True
        else:
            raise _MalformedError

    def finish(self) -> Fraction:
        """Return the value of the expression. Raises _MalformedError if it is incomplete, ZeroDivisionError as
        `read`."""
        if self._wants_operand:
            raise _MalformedError
        self._reduce(above=0)
        if self._pending:
            raise _MalformedError
        return self._values.pop()

    def _read_operand(self, symbol: str) -> None:
        if symbol == "(":
            self._pending.append(symbol)
        elif symbol.isdecimal() and (symbol == "0" or symbol[0] != "0"):
            self._values.append(Fraction(int(symbol)))
            self._wants_operand = False
        else:
            raise _MalformedError

    def _reduce(self, above: int) -> None:
        """Apply the pending operators that bind at least as tightly as `above`, back to the innermost parenthesis."""
        while self._pending and self._pending[-1] != "(" and _PRECEDENCE[self._pending[-1]] >= above:
            right, left = self._values.pop(), self._values.pop()
            match self._pending.pop():
                case "+":
                    self._values.append(left + right)
                case "-":
                    self._values.append(left - right)
                case "*":
                    self._values.append(left * right)
                case _:
                    self._values.append(left / right)
