"""Random arithmetic expressions with whole intermediate values, and the steps that work them out, written and read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from rewards.reading.arithmetic import Operator

_PRECEDENCE: dict[Operator, int] = {"+": 1, "-": 1, "*": 2, "/": 2}
_OPERAND = r"(\d{1,9}|\(-\d{1,9}\))"
_STEP = re.compile(rf"{_OPERAND}([-+*/]){_OPERAND}=(-?\d{{1,9}})", re.ASCII)
_BETWEEN_STEPS = re.compile(r"[;\n]")


@dataclass(frozen=True, slots=True)
class Join:
    """Two expressions joined by an operator."""

    value: int
    """What it comes to; it may be negative."""
    left: Expression
    """The expression before the operator."""
    operator: Operator
    """The operator; a division has no remainder."""
    right: Expression
    """The expression after the operator."""


Expression = int | Join
"""A number, or a `Join`."""


def random_expression(rng: Random, numbers: Sequence[int], operators: Sequence[Operator]) -> Expression | None:
    """An expression that uses each of `numbers` once; None when the draw has a division with a remainder or by zero.

    Every draw joins two of the remaining terms, so each way to set parentheses can occur.
    """
    terms: list[Expression] = list(numbers)
    while len(terms) > 1:
        left = terms.pop(rng.randrange(len(terms)))
        right = terms.pop(rng.randrange(len(terms)))
        operator = rng.choice(operators)
        value = _apply(value_of(left), operator, value_of(right))
        if value is None:
            return None
        terms.append(Join(value, left, operator, right))
    return terms[0]


def value_of(expression: Expression) -> int:
    """What an expression comes to."""
    return expression if isinstance(expression, int) else expression.value


def text_of(expression: Expression) -> str:
    """The expression without spaces, and with no parentheses that its value does not need."""
    if isinstance(expression, int):
        return str(expression)
    precedence = _PRECEDENCE[expression.operator]
    # a-(b+c) and a/(b*c) need their parentheses; a+(b-c) and a*(b/c) do not.
    min_right = precedence + 1 if expression.operator in "-/" else precedence
    left, right = _operand(expression.left, precedence), _operand(expression.right, min_right)
    return f"{left}{expression.operator}{right}"


def steps_of(expression: Expression) -> list[str]:
    """One equation per operator in an order in which they can be worked out, e.g. `7*9 = 63`, `3+63 = 66`."""
    if isinstance(expression, int):
        return []
    left, right = _signed(value_of(expression.left)), _signed(value_of(expression.right))
    step = f"{left}{expression.operator}{right} = {expression.value}"
    return [*steps_of(expression.left), *steps_of(expression.right), step]


def num_right_steps(text: str, numbers: Sequence[int]) -> int:
    """How many of the first steps of a text are right: true, and each of two numbers that are left, as `steps_of` says.

    Left are `numbers`, less those that a step has used, and what it came to. Steps stand on lines of their own or
    between semicolons, with or without spaces. Reading ends at the first that is not right. Never raises.
    """
    left, num_right = Counter(numbers), 0
    for written in _BETWEEN_STEPS.split(text, maxsplit=len(numbers))[: len(numbers) - 1]:
        step = _STEP.fullmatch(written.replace(" ", ""))
        if step is None:
            break
        first, second, result = (int(step[group].strip("()")) for group in (1, 3, 4))
        used = Counter((first, second))
        operator = next(known for known in _PRECEDENCE if known == step[2])
        if not used <= left or _apply(first, operator, second) != result:
            break
        left = left - used + Counter([result])
        num_right += 1
    return num_right


def _apply(left: int, operator: Operator, right: int) -> int | None:
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            return left // right if right != 0 and left % right == 0 else None


def _operand(expression: Expression, min_precedence: int) -> str:
    """An operand's text, in parentheses when it binds less tightly than `min_precedence`."""
    needs_parentheses = isinstance(expression, Join) and _PRECEDENCE[expression.operator] < min_precedence
    return f"({text_of(expression)})" if needs_parentheses else text_of(expression)


def _signed(value: int) -> str:
    return str(value) if value >= 0 else f"({value})"
