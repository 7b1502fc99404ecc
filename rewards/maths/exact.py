"""Exact and bounded evaluation of the numbers in a sympy expression.

Imported only by the worker process.
"""

from __future__ import annotations

from typing import Any

from latex2sympy2_extended.logic import And
from latex2sympy2_extended.sets import FiniteSet
from sympy import (
    Add,
    Basic,
    E,
    Float,
    I,
    Interval,
    MatrixBase,
    MatrixExpr,
    Mul,
    Number,
    Pow,
    Product,
    Rational,
    Set,
    Sum,
    Symbol,
    Tuple,
    UnevaluatedExpr,
    binomial,
    factorial,
    factorial2,
)
from sympy.core.relational import Relational

MAX_BITS = 1 << 17
"""Larger numbers are not evaluated. This is 39,000 digits; 9,999! has fewer."""
HUNDREDTH = UnevaluatedExpr(Rational(1, 100))
"""The factor by which Math-Verify represents a percent sign."""


class NumberTooLargeError(Exception):
    """A number has too many digits to be evaluated."""


def exact(tree: Any) -> Any:
    """Evaluate all rational numbers of an answer. Raises NumberTooLargeError."""
    if isinstance(tree, Tuple | And | FiniteSet):
        return type(tree)(*map(exact, getattr(tree, "_unsorted_args", tree.args)))
    if isinstance(tree, Interval):
        return _interval(tree)
    if isinstance(tree, Relational) or (isinstance(tree, Set) and tree.args):
        return tree.func(*map(exact, tree.args), evaluate=False)
    number = of_percent(tree)
    return evaluated(tree) if number is None else Mul(evaluated(number), HUNDREDTH, evaluate=False)


def of_percent(tree: Any) -> Any:
    """Return the number before a percent sign; None without one."""
    is_percent = isinstance(tree, Mul) and len(tree.args) == 2 and tree.args[1] == HUNDREDTH
    return tree.args[0] if is_percent else None


def evaluated(tree: Any) -> Any:
    """Return a term with all its rational numbers evaluated. Raises NumberTooLargeError."""
    if isinstance(tree, MatrixBase):
        return tree.applyfunc(evaluated)
    if isinstance(tree, Symbol) and tree.name == "i":
        return I
    if isinstance(tree, Float):
        return Rational(str(tree))
    if not isinstance(tree, Basic) or not tree.args or isinstance(tree, Symbol | Sum | Product) or _is_word(tree):
        return _bounded(tree)
    return _joined(tree, [evaluated(part) for part in tree.args])


def bits(number: Rational) -> int:
    """Return the number of bits of the larger of numerator and denominator."""
    return max(int(number.p).bit_length(), int(number.q).bit_length())


def check(num_bits: Any) -> None:
    """Raise NumberTooLargeError for more than `MAX_BITS`."""
    if num_bits > MAX_BITS:
        raise NumberTooLargeError


def _interval(tree: Interval) -> Any:
    start, end = exact(tree.start), exact(tree.end)
    # The parser reads a descending pair as a pair, but not if its numbers are still unevaluated.
    is_falling = tree.left_open and tree.right_open and (evaluated(end) - evaluated(start)).is_nonpositive
    return Tuple(start, end) if is_falling else Interval(start, end, tree.left_open, tree.right_open)


def _is_word(tree: Any) -> bool:
    """Return whether a product may be a word, in which order matters: Math-Verify compares it with a name."""
    return isinstance(tree, Mul) and all(isinstance(part, Symbol) or part is E for part in tree.args)


def _joined(tree: Any, parts: list[Any]) -> Any:
    """Rebuild a term from its evaluated parts."""
    if isinstance(tree, UnevaluatedExpr):
        return parts[0]
    if isinstance(tree, MatrixExpr):
        return tree.func(*parts).doit()
    if isinstance(tree, Add | Mul):
        total = parts[0]
        for part in parts[1:]:
            total = _bounded(total + part if isinstance(tree, Add) else total * part)
        return total
    if isinstance(tree, Pow):
        _check_power(*parts)
    elif isinstance(tree, factorial | factorial2 | binomial) and all(isinstance(part, Rational) for part in parts):
        largest = max(abs(part) for part in parts)
        check(largest if isinstance(tree, binomial) else largest * bits(largest))
    return _bounded(tree.func(*parts))


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, Rational) and isinstance(exponent, Rational) and base not in (0, 1, -1):
        check((bits(base) - 1) * abs(exponent))
    elif isinstance(exponent, Number) and base.is_number:
        # sympy expands a power of a sum of roots.
        check(abs(exponent))


def _bounded(tree: Any) -> Any:
    if isinstance(tree, Rational) and tree.is_finite:
        check(bits(tree))
    return tree
