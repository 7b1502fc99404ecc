"""Bounded evaluation of Python arithmetic without `eval`, for the first d1's Countdown reward."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

MAX_CHARS = 256
"""Longer texts have no value, which bounds depth and time."""
MAX_BITS = 4096
"""Integer powers that would need more bits have no value, so that `99**99**99` costs nothing."""

_ALLOWED = re.compile(r"[\d+\-*/().\s]+")
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate_python_arithmetic(text: str) -> complex | None:
    """Return Python's value of digits, points, parentheses and + - * / ** //; None if it is no number.

    The same as `evaluate_equation` of the first d1 (`diffu-grpo/reward_func.py`), except that texts and powers beyond
    the limits give None instead of being computed. Never raises.
    """
    if len(text) > MAX_CHARS or not _ALLOWED.fullmatch(text):
        return None
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (ValueError, TypeError, ArithmeticError, SyntaxError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right):
            return _applied(op, _value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand):
            return _UNARY[type(op)](_value(operand))
    # An empty tuple or a call.
    raise ValueError


def _applied(op: ast.operator, left: Any, right: Any) -> Any:
    is_integer_power = isinstance(op, ast.Pow) and isinstance(left, int) and isinstance(right, int)
    if is_integer_power and left.bit_length() * abs(right) > MAX_BITS:
        raise ValueError
    return _BINARY[type(op)](left, right)
