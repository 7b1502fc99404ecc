"""Equality of two math answers: Math-Verify parses them, this module compares numbers and terms.

Math-Verify compares with an absolute tolerance, so that any two small numbers are equal. Here numbers are exact:
decimals are read as fractions. Imported only by the worker process.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import math_verify.grader as math_verify
from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy, convert_to_pct
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from latex2sympy2_extended.sets import FiniteSet
from math_verify.parser import get_last_eq
from sympy import (
    Abs,
    Derivative,
    Eq,
    Expr,
    Integral,
    Interval,
    Limit,
    MatrixBase,
    Product,
    Rational,
    Sum,
    Symbol,
    Tuple,
    factorial2,
    nan,
    simplify,
)

from rewards.maths.exact import MAX_BITS, NumberTooLargeError, bits, evaluated, exact, of_percent

# Units and boxes have already been removed.
_SPELLING = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
_LITERAL = re.compile(r"[0-9]+")
_PLAIN = re.compile(r"[0-9.]+(?:\^\{?\\circ\}?)?")
_PROPER = re.compile(r"\\frac\{([0-9]+)\}\{([0-9]+)\}")
# Irrational numbers are equal if they agree in this many digits, plus as many as there are bits in their rationals.
_DIGITS = 50
_MAX_DIGITS = 4000
# Relative tolerance between an irrational number and a decimal approximation of it.
_ROUNDING = Rational(1, 10**6)
_WORK = (Sum, Product, Integral, Limit, Derivative)


def is_right(request: dict[str, Any]) -> bool:
    """Return whether `answer` is equivalent to `gold`. `gold_percent` and `answer_percent`: whether a percent sign
    follows."""
    gold = _read(request["gold"], request["gold_percent"])
    answer = _read(request["answer"], request["answer_percent"])
    of_gold, of_answer = _assigned(gold[0]), _assigned(answer[0])
    if of_gold is not None:
        if of_answer is None:
            given = _elements(answer[0])
        else:
            given = [of_answer.get(symbol) for symbol in of_gold] if len(of_answer) == len(of_gold) else []
        if len(given) == len(of_gold):
            return all(map(_is_equal, of_gold.values(), given))
    return bool(math_verify.verify(gold, answer, timeout_seconds=None, allow_set_relation_comp=True))


def _is_equal(gold: Any, answer: Any) -> bool:
    return answer is not None and bool(math_verify.verify([gold], [answer], timeout_seconds=None))


def _assigned(tree: Any) -> dict[Any, Any] | None:
    """Return the values of several symbols, from `x=1, y=2` or `(x, y) = (1, 2)`; Math-Verify would sort them."""
    if isinstance(tree, FiniteSet) and all(isinstance(part, Eq) for part in tree.args):
        values = {part.lhs: part.rhs for part in sorted(tree.args, key=lambda part: str(part.lhs))}
        return values if 1 < len(values) == len(tree.args) else None
    if isinstance(tree, Eq) and isinstance(tree.lhs, Tuple) and len(_elements(tree.rhs)) == len(tree.lhs):
        return dict(zip(tree.lhs, _elements(tree.rhs), strict=True))
    return None


def _elements(tree: Any) -> list[Any]:
    """Return the elements of a list in order. The parser reads an ascending pair as an interval."""
    if isinstance(tree, Interval) and tree.left_open and tree.right_open:
        return [tree.start, tree.end]
    return list(getattr(tree, "_unsorted_args", tree.args)) if isinstance(tree, Tuple | FiniteSet) else []


@lru_cache(maxsize=256)
def _read(text: str, percent: bool) -> list[Any]:
    """Return the expression, if it can be parsed and evaluated, and its spelling."""
    latex = normalize_latex(text, _SPELLING)
    spelling = rf"{latex}\%" if percent else latex
    try:
        tree = _parsed_either(latex)
        if any(not one.expr.free_symbols & set(one.variables) for one in tree.atoms(Derivative)):
            # For example `\\frac{dy}{dx}`, which would evaluate to 0.
            return [spelling]
        tree = exact(convert_to_pct(tree) if percent and isinstance(tree, Expr) else tree)
    except MemoryError:
        raise
    except Exception:
        # The grammar can raise any exception. What it cannot parse is compared by its spelling.
        return [spelling]
    return [tree, spelling]


def _parsed_either(latex: str) -> Any:
    r"""Return both values if one `\pm` is inside a term such as a fraction: the grammar supports it only between
    terms."""
    try:
        return _parsed(latex)
    except NumberTooLargeError:
        raise
    except Exception:
        if latex.count(r"\pm") != 1:
            raise
        return FiniteSet(*(_parsed(latex.replace(r"\pm", sign)) for sign in "+-"))


def _parsed(latex: str) -> Any:
    last = get_last_eq(latex)
    # SLL is several times faster than LL, and gives the same result wherever it succeeds.
    tries = [(text, mode) for text in dict.fromkeys((latex, last)) for mode in (PredictionMode.SLL, PredictionMode.LL)]
    for text, mode in tries[:-1]:
        try:
            return _LatexParser(text, mode).parse(text)
        except NumberTooLargeError:
            raise
        except Exception:  # noqa: S112 - the grammar raises whatever it likes
            continue
    text, mode = tries[-1]
    return _LatexParser(text, mode).parse(text)


class _LatexParser(_Latex2Sympy):
    """Math-Verify's parser, with exact decimals, and `2(3)` as a product instead of a mixed number."""

    def __init__(self, latex: str, mode: Any) -> None:
        super().__init__(is_real=not math_verify.should_treat_as_complex(latex))
        self._mode = mode

    def create_parser(self, latex_str: str) -> Any:
        parser = super().create_parser(latex_str)
        parser._interp.predictionMode = self._mode
        return parser

    def parse_number(self, text: str) -> Any:
        digits, _, exponent = text.replace(",", "").lower().partition("e")
        if abs(int(exponent or 0)) * 4 > MAX_BITS:
            raise NumberTooLargeError
        return Rational(digits) * Rational(10) ** int(exponent or 0)

    def convert_interval(self, expr: Any) -> Any:
        # The parent compares its ends. Evaluating them first raises NumberTooLargeError if that would take too long.
        for end in expr.expr():
            evaluated(self.convert_expr(end))
        return super().convert_interval(expr)

    def convert_postfix(self, postfix: Any) -> Any:
        operations = postfix.postfix_op()
        if len(operations) == 2 and all(operation.BANG() for operation in operations):
            number = self.convert_exp(postfix.exp() if hasattr(postfix, "exp") else postfix.exp_nofunc())
            return factorial2(number, evaluate=False)
        number = super().convert_postfix(postfix)
        if len([operation for operation in operations if operation.BANG()]) > 1:
            raise ValueError("there are several factorials")
        if any(operation.transpose() for operation in operations) and not getattr(number, "is_Matrix", False):
            raise ValueError("the transpose of a symbol would be the symbol")
        return number

    def convert_func(self, func: Any) -> Any:
        if func.FUNC_SQRT() and func.root:
            base, root = evaluated(self.convert_expr(func.base)), self.convert_expr(func.root)
            # The parent takes the complex root.
            if base.is_negative and root.is_odd:
                return -((-base) ** (1 / root))
        return super().convert_func(func)

    def convert_postfix_list(self, arr: list[Any], i: int = 0) -> Any:
        first = self.convert_postfix(arr[i])
        is_followed = i + 1 < len(arr) and _LITERAL.match(arr[i + 1].getText())
        if is_followed and (isinstance(first, Symbol) or _PLAIN.fullmatch(arr[i].getText())):
            # The parent would read `5 feet 3` and `3 feet 5` as the same product.
            raise ValueError("a number stands behind a number, a word or a symbol")
        if i == len(arr) - 1 or not isinstance(first, Expr):
            return super().convert_postfix_list(arr, i)
        if not _LITERAL.fullmatch(arr[i].getText()):
            return self._times(first, self.convert_postfix_list(arr, i + 1))
        fraction = _PROPER.fullmatch(arr[i + 1].getText())
        if fraction is not None and 0 < int(fraction[1]) < int(fraction[2]):
            mixed = first + Rational(int(fraction[1]), int(fraction[2]))
            return mixed if i + 2 == len(arr) else self._times(mixed, self.convert_postfix_list(arr, i + 2))
        return self._times(first, self.convert_postfix_list(arr, i + 1))

    def _times(self, left: Any, right: Any) -> Any:
        is_matrix = getattr(left, "is_Matrix", False) or getattr(right, "is_Matrix", False)
        return (self.mat_mul_flat if is_matrix else self.mul_flat)(left, right)


def _same_value(gold: Any, answer: Any, *_: Any) -> bool:
    """Return whether two numbers or matrices are equal; terms with symbols only if they are the same term."""
    if isinstance(gold, MatrixBase) and isinstance(answer, MatrixBase):
        return gold.shape == answer.shape and all(
            _same_value(one, other) or _same_term(one, other)
            for one, other in zip(gold.flat(), answer.flat(), strict=True)
        )
    if not isinstance(gold, Expr) or not isinstance(answer, Expr):
        return False
    of_gold, of_answer = of_percent(gold), of_percent(answer)
    if (of_gold is None) != (of_answer is None):
        return _same_share(gold, answer)
    gold, answer = _evaluate_unevaluated(gold), _evaluate_unevaluated(answer)
    if gold == answer:
        return gold is not nan
    return gold.is_number and answer.is_number and _same_number(gold, answer)


def _same_share(gold: Expr, answer: Expr) -> bool:
    """Return whether two numbers are equal, one of which has a percent sign, which may be omitted."""
    of_gold, of_answer = of_percent(gold), of_percent(answer)
    if of_gold is not None:
        return _same_value(of_gold, answer) or _same_value(of_gold / 100, answer)
    # Up to 1 the gold answer may be a fraction of 1, and 0.5% is not 0.5.
    may_be_left_out = gold.is_number and bool(abs(gold) > 1)
    return _same_value(gold, of_answer / 100) or (may_be_left_out and _same_value(gold, of_answer))


def _same_term(gold: Any, answer: Any) -> bool:
    """Return whether two terms with symbols are equal for all values of the symbols."""
    if isinstance(gold, MatrixBase) or isinstance(answer, MatrixBase):
        return False
    if gold.is_number and answer.is_number:
        return False
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    # Terms that differ at one point are not equal. `simplify` alone fails for terms of high degree.
    values = {symbol: Rational(2 * index + 3, 7 + index) for index, symbol in enumerate(symbols)}
    at_gold, at_answer = (term.evalf(_DIGITS, subs=values) for term in (gold, answer))
    if at_gold.is_number and at_answer.is_number and not _are_close(at_gold, at_answer, _DIGITS):
        return False
    return bool(simplify(gold - answer).is_zero)


def _same_number(gold: Expr, answer: Expr) -> bool:
    """Return whether two numbers are equal: rational ones exactly, others in many digits."""
    if isinstance(gold, Rational) and isinstance(answer, Rational):
        return bool(gold == answer)
    if not (gold.is_finite is not False and answer.is_finite is not False):
        return False
    if gold == 0 or answer == 0:
        return bool((gold - answer).equals(0))
    numbers = (gold - answer).atoms(Rational)
    digits = _DIGITS + sum(bits(number) for number in numbers)
    if digits <= _MAX_DIGITS and _are_close(gold, answer, _DIGITS) and _are_close(gold, answer, digits):
        return True
    return _is_rounded(gold, answer)


def _are_close(gold: Expr, answer: Expr, digits: int) -> bool:
    """Return whether two numbers agree in all but the last ten of `digits` digits."""
    one, other = gold.evalf(digits), answer.evalf(digits)
    return bool(Abs(one - other).evalf(digits) <= Rational(1, 10 ** (digits - 10)) * Abs(other))


def _is_rounded(gold: Expr, answer: Expr) -> bool:
    """Return whether one number is irrational and the other a decimal approximation of it."""
    decimal, number = (gold, answer) if isinstance(gold, Rational) else (answer, gold)
    if not isinstance(decimal, Rational) or isinstance(number, Rational):
        return False
    is_decimal = pow(10, bits(decimal), int(decimal.q)) == 0 and decimal.q > 1
    return is_decimal and bool(Abs(number.evalf(_DIGITS) - decimal) <= _ROUNDING * abs(decimal))


def _evaluate_unevaluated(term: Any) -> Any:
    """Evaluate the sums, products, limits, integrals and derivatives in a term."""
    return term.doit() if term.has(*_WORK) else term


math_verify.sympy_numeric_eq = _same_value
math_verify.sympy_symbolic_eq = _same_term
