"""Tests of answers that a CAS confuses: dropped primes, sorted lists, multiplied letters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rewards import Outcome
from rewards.maths import MathVerifier, final_term, judge_answer


@pytest.fixture(scope="module")
def maths() -> Iterator[MathVerifier]:
    maths = MathVerifier()
    yield maths
    maths.close()


_KINDS: dict[str, list[tuple[str, str, bool]]] = {
    "primes": [
        ("f'(x)", "f(x)", False),
        ("f''(x)", "f'(x)", False),
        ("f''(x)", r"f^{\prime\prime}(x)", True),
        ("A'B'", "AB", False),
        ("A'", r"A^\prime", True),
        ("f'(x) = 2x", "2x", True),
        (r"\text{don't know}", r"\text{don't know}", True),
    ],
    "derivatives and transposes of symbols": [
        (r"\frac{dy}{dx}", r"\frac{dx}{dy}", False),
        (r"\frac{dy}{dx}", "0", False),
        (r"\frac{d}{dx} x^2", "2x", True),
        ("A^T", "A", False),
        ("A^T", "$A^T$", True),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^T", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", True),
    ],
    "double factorials": [
        ("3!!", "720", False),
        ("7!!", "105", True),
        ("2^{5!!}", "2^{15}", True),
        ("(3!)!", "720", True),
        ("n!!", "(n!)!", False),
        ("9!!!", "9", False),
        ("(10^9+1)!!", "(10^9+3)!!", False),
    ],
    "other bases": [
        ("0x1F", "0x1E", False),
        ("0x1F", "0x1f", True),
        ("0", "0x1F", False),
        ("0", "0b101", False),
    ],
    "values of several symbols": [
        ("x=1, y=2", "(2, 1)", False),
        ("x=1, y=2", "2, 1", False),
        ("x=1, y=2", "(1, 2)", True),
        ("x=1, y=2", "y=2, x=1", True),
        ("x=1, y=2", "(y, x) = (2, 1)", True),
        ("x=1, y=2", "(x, y) = (2, 1)", False),
        ("(x, y, z) = (2, 3, 1)", "x=2, z=1, y=3", True),
        ("x=1, y=2", "x=1, z=2", False),
        ("a=10^{-9}, b=1", "a=10^{-8}, b=1", False),
        ("y=2, x=1", "(1, 2)", True),
        (r"x=\sqrt2+1, y=2", r"(\sqrt2+1, 2)", True),
        ("x=1, x=2", "2, 1", True),
    ],
    "sets and tuples": [
        ("(1,2)", r"\{1,2\}", False),
        (r"\{1,2\}", r"\left(2,1\right)", False),
        (r"\{1,2\}", "2, 1", True),
        (r"\{(1,2),(3,4)\}", "(3,4), (1,2)", True),
    ],
    "times, dates, ranges and ratios": [
        ("3:45", "1:15", False),
        (r"9:05 \text{ a.m.}", "09:05", True),
        ("2:3", "4:6", True),
        ("2:3:4", "2:4:3", False),
        ("1:2:3", r"\frac16", False),
        ("2021-03-04", "2021-04-03", False),
        ("2014", "2021-03-04", False),
        ("1/2/2020", "2/4/2020", False),
        ("10-12", "12-14", False),
        ("10-12", "10 - 12", True),
    ],
    "words beside numbers": [
        (r"5 \text{ feet } 3 \text{ inches}", r"3 \text{ feet } 5 \text{ inches}", False),
        (r"1 \text{ to } 2", r"2 \text{ to } 1", False),
        ("5 R 2", "2 R 5", False),
        ("2^3 3^2", "72", True),
        (r"30^\circ 15'", r"15^\circ 30'", False),
        (r"30^\circ 15'", "450", False),
        ("52", "5'2\"", False),
        ("5'2\"", "5'2\"", True),
        (r"25\% \text{ increase}", r"25\% \text{ decrease}", False),
        (r"\$5 \text{ profit}", r"\$5 \text{ loss}", False),
        (r"\$5 \text{ profit}", "5", True),
    ],
    "letters in another order": [
        ("listen", "silent", False),
        ("ASA", "AAS", False),
        ("IX", "XI", False),
        ("AB", "BA", True),
        (r"\angle ABC", r"\angle ACB", False),
        ("abc", "cab", True),
        ("x^2 y", "y x^2", True),
    ],
    "what the grammar does not read": [
        (r"\sqrt[3]{-8}", "-2", True),
        (r"\frac{1 \pm \sqrt5}{2}", r"\frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}", True),
        (r"\frac{1 \pm \sqrt5}{2}", r"\frac{1+\sqrt5}{2}", False),
        (r"\mathbb R", r"\mathbb{R}", True),
        ("A, C", r"\text{A, C}", True),
        ("4m^2", "4", False),
        ("1", r"1\%", False),
    ],
}


@pytest.mark.parametrize("kind", _KINDS)
def test_answers_that_sympy_confuses_are_distinguished(maths: MathVerifier, kind: str) -> None:
    verdicts = {pair: judge_answer(maths, question="What?", gold=pair[0], answer=pair[1]) for pair in _KINDS[kind]}
    assert [pair for pair, verdict in verdicts.items() if verdict.right != pair[2]] == []
    assert {verdict.outcome for verdict in verdicts.values()} == {Outcome.GRADED}


@pytest.mark.parametrize(
    ("text", "term"),
    [
        (r"$-\boxed{5}$", "-5"),
        (r"so $-\boxed{\sqrt3}$", r"-\sqrt3"),
        (r"\boxed{3} million", "3 million"),
        (r"$\boxed{30}^\circ$", "30"),
        (r"$-\boxed{x+1}$", "x+1"),
        (r"$7-2 = \boxed{5}$ apples", "5"),
        ("<answer>5</answer>", "5"),
        ("5", None),
    ],
)
def test_signs_and_scales_around_a_box_count(text: str, term: str | None) -> None:
    assert final_term(text) == term
