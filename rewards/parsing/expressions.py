"""Random arithmetic expressions with integer intermediate values, and their worked-out steps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from rewards.parsing.arithmetic import Operator

_PRECEDENCE: dict[Operator, int] = {"+": 1, "-": 1, "*": 2, "/": 2}
_OPERAND = r"(\d{1,9}|\(-\d{1,9}\))"
_STEP = re.compile(rf"{_OPERAND}([-+*/]){_OPERAND}=(-?\d{{1,9}})", re.ASCII)
_BETWEEN_STEPS = re.compile(r"[;\n]")


@dataclass(frozen=True, slots=True)
class BinaryOperation:
    """Two expressions joined by an operator."""

    value: int
    """Its value; may be negative."""
    left: Expression
    """The expression before the operator."""
    operator: Operator
    """The operator; divisions leave no remainder."""
    right: Expression
    """The expression after the operator."""


Expression = int | BinaryOperation
"""A number, or a `BinaryOperation`."""


def random_expression(rng: Random, numbers: Sequence[int], operators: Sequence[Operator]) -> Expression | None:
    """Return a random expression that uses each of `numbers` once; None if it would divide by zero or with a remainder.

    Repeatedly joins two of the remaining terms, so every parenthesization can occur.
    """
    terms: list[Expression] = list(numbers)
    while len(terms) > 1:
        left = terms.pop(rng.randrange(len(terms)))
        right = terms.pop(rng.randrange(len(terms)))
        operator = rng.choice(operators)
        value = _apply(value_of(left), operator, value_of(right))
        if value is None:
            return None
        terms.append(BinaryOperation(value, left, operator, right))
    return terms[0]


def value_of(expression: Expression) -> int:
    """Return the value of an expression."""
    return expression if isinstance(expression, int) else expression.value


def text_of(expression: Expression) -> str:
    """Return the expression without spaces and without redundant parentheses."""
    if isinstance(expression, int):
        return str(expression)
    precedence = _PRECEDENCE[expression.operator]
    # a-(b+c) and a/(b*c) need their parentheses; a+(b-c) and a*(b/c) do not.
    min_right = precedence + 1 if expression.operator in "-/" else precedence
    left, right = _operand(expression.left, precedence), _operand(expression.right, min_right)
    return f"{left}{expression.operator}{right}"


def steps_of(expression: Expression) -> list[str]:
    """Return one equation per operator, in an order in which they can be worked out, e.g. `7*9 = 63`, `3+63 = 66`."""
    if isinstance(expression, int):
        return []
    left, right = _signed(value_of(expression.left)), _signed(value_of(expression.right))
    step = f"{left}{expression.operator}{right} = {expression.value}"
    return [*steps_of(expression.left), *steps_of(expression.right), step]


def count_correct_steps(text: str, numbers: Sequence[int]) -> int:
    """Count the correct steps at the start of a text, written as by `steps_of`.

    A step is correct if it is true and its two operands are still available. Available are `numbers`, minus those
    already used, plus the results of earlier steps. Steps are separated by line ends or semicolons; spaces do not
    matter. Counting stops at the first incorrect step. Never raises.
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
    """Return an operand's text, in parentheses if it binds less tightly than `min_precedence`."""
    needs_parentheses = isinstance(expression, BinaryOperation) and _PRECEDENCE[expression.operator] < min_precedence
    return f"({text_of(expression)})" if needs_parentheses else text_of(expression)


def _signed(value: int) -> str:
    return str(value) if value >= 0 else f"({value})"
