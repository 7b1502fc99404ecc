"""Tests of parsing expressions and equations in common notations."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.parsing.equations import MAX_EQUATION_CHARS, final_equation, read_statements


def _values(text: str) -> list[Fraction] | None:
    """Return the values of both sides of the last statement."""
    statements = read_statements(text)
    return [side.value for side in statements[-1]] or None if statements else None


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (
            [24],
            [
                "2 x 3 x 4",
                "2x3X4",
                "2 \u00d7 3 \u2217 4",
                "2\u22c53\u00b74",
                "2\u20223 \u2716\ufe0f 4",
                "2 times 3 multiplied by 4",
            ],
        ),
        (
            [24],
            [
                r"2 \times 3 \cdot 4",
                r"2 \ast 3 \bullet 4",
                "2(3)(4)",
                "(2)(3)4",
                r"\(2 \cdot 3\, \cdot 4\)",
                "$$2*3*4$$",
            ],
        ),
        (
            [8],
            [
                "9 \u2013 3 + 2",
                "9 \u2212 3 + 2",
                "9\u20113\uff0b2",
                "9 minus 3 plus 2",
                "9 \u2796 3 \u2795 2",
                "9\ufe633+2",
            ],
        ),
        (
            [4],
            [
                r"\frac{6}{3} \times 2",
                r"\frac63*2",
                r"\dfrac{6 \cdot 2}{3}",
                "6 \u00f7 3 * 2",
                "6 : 3 * 2",
                "6:3*2",
                "6 divided by 3 times 2",
                r"\begin{align*}\frac{6}{3} \cdot 2\end{align*}",
                "6\u20443*2",
            ],
        ),
        (
            [8],
            [
                r"\frac{\frac{48}{2}}{3}",
                r"\left(\frac{48}{2}\right) \div 3",
                "[48 / {2}] / 3",
                r"\{48/2\}/3",
                "48/2/(3)",
            ],
        ),
        ([70], ["10(3+4)", "(3 + 4)10", "10[3+4]", r"10\left(3+4\right)", r"10 \bigl(3+4\bigr)", "10 \uff083+4\uff09"]),
        (
            [5],
            [
                "1,002 - 997",
                "x = 2+3",
                "Answer: 2+3",
                "**2 + 3**",
                "`2+3`",
                "~~~\n2+3\n~~~",
                '"2 + 3".',
                "1. 2 + 3",
                "> 2+3",
                "2+3 =",
            ],
        ),
        (
            [5],
            [
                "2+3 \u2713",
                "2 + 3 (each number once)",
                "So, 2 + 3 it is",
                r"\text{2+3}",
                "4+4; 2+3",
                "5: 2+3",
                "<b>2+3</b>",
                "2+3<|eot_id|>",
                "2+3 \\\\",
                "2+3\nwith 2 numbers",
                "4+4\n2+3\nas required",
                "4+4, 2+3",
            ],
        ),
        (
            [5, 5],
            [
                "2+3 = 5",
                "2+3 == 5.0",
                "2+3 \u2192 5",
                "2+3 => 5",
                "2+3 (= 5)",
                "2+3, which equals 5",
                "2+3\n= 5",
                "2+3 &= 5",
                "5 = 2+3",
            ],
        ),
        ([5, -5], ["2+3 = -5"]),
        ([5], ["5", "= 5", "the target is 5"]),
        (
            None,
            [
                "",
                "x",
                "2**3",
                "2^3",
                "2 ** 3",
                "**2**3",
                "7//2",
                "5%3",
                "3!",
                "2+3!",
                "3! + 2",
                "2 3",
                "{2}{3}",
                r"2\,3",
                r"2\!3",
                "2$3",
            ],
        ),
        (
            None,
            [
                "-3+5",
                "2 + -3",
                "2.5*2",
                "(2+3",
                "2+3)",
                "2+3 = x",
                "2+3 or 4",
                "2+3 \u2248 5",
                "2+3 \u2260 5",
                "1/0",
                "2 + 3 = 1/0",
            ],
        ),
        (
            None,
            [
                "sqrt(9)*3",
                "\u221a9*3",
                r"\sqrt{9}*3",
                "square root of 9 * 3",
                "twice 2+3",
                "2+3 squared",
                "abs(2-3)",
                "x2+3",
                r"2\frac{1}{2}",
            ],
        ),
        (None, ["\u0661+\u0662", "\uff11+\uff12", r"\frac{\frac{48}{2}}", "9" * (MAX_EQUATION_CHARS + 1)]),
    ],
)
def test_common_notations_are_parsed(values: list[int] | None, texts: list[str]) -> None:
    expected = None if values is None else [Fraction(value) for value in values]
    assert {text: _values(text) for text in texts} == dict.fromkeys(texts, expected)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 2+3 </answer>", "2+3"),
        (r"<answer>2+3 = \boxed{5}</answer>", "2+3 = 5"),
        ("Well.\nSo $2+3 = \\boxed{5}$.", "So $2+3 = 5"),
        (r"With 2 and 3: \boxed{2+3} = 6.", "2+3 = 6."),
        (r"\boxed{2+3}, and so on", "2+3"),
        (r"<answer>\boxed{}</answer>", r"\boxed{}"),
        ("2+3", None),
    ],
)
def test_an_equation_in_a_box_is_parsed(text: str, answer: str | None) -> None:
    assert final_equation(text) == answer


@given(st.text(), st.text(alphabet="0123456789+-*/=()[]{}.,;x \n\\fracboxed"))
def test_parsing_equations_never_raises(text: str, numeric: str) -> None:
    for hostile in (text, numeric):
        read_statements(hostile)
        final_equation(hostile)


@pytest.mark.parametrize(
    "piece", ["1+", "\\frac{", "\\frac{1}{", "((", "{", "= ", "a ", "  ", "1, ", "\n=", "`", "\\text", "9", "which "]
)
def test_hostile_equations_take_bounded_time(piece: str) -> None:
    text = (piece * MAX_EQUATION_CHARS)[:MAX_EQUATION_CHARS]
    start = time.process_time()
    read_statements(text)
    assert time.process_time() - start < 1.0
