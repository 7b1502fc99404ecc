"""Tests of the arithmetic evaluator: exact on expressions, and refuses all other text."""

from __future__ import annotations

import re
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.parsing.arithmetic import MAX_EXPRESSION_CHARS, evaluate

_NUMBERS = st.integers(0, 10_000).map(str)
_EXPRESSIONS = st.recursive(
    _NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", " + ", " -\t", "* ", " /"]), inner).map("".join),
        inner.map("({})".format),
        inner.map("( {} )".format),
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("0", 0),
        ("2*4-3", 5),
        ("3+7*9", 66),
        ("(3+7)*9", 90),
        ("9-3-2", 4),
        ("9-(3-2)", 8),
        ("24/4/2", 3),
        ("24/(4/2)", 12),
        ("24/4*2", 12),
        ("1/3+1/3+1/3", 1),
        ("1/2", Fraction(1, 2)),
        ("3-7", -4),
        ("((((7))))", 7),
        (" 2 *\t4 - 3 ", 5),
        ("0/5", 0),
    ],
)
def test_expressions_have_their_exact_value(text: str, value: int | Fraction) -> None:
    evaluation = evaluate(text)
    assert evaluation is not None
    assert evaluation.value == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "()",
        "(",
        ")",
        "(1",
        "1)",
        ")1(",
        "1+",
        "+1",
        "-3",
        "2*-3",
        "--3",
        "(-3)",
        "1++2",
        "2**3",
        "2//3",
        "7//2",
        "2(3)",
        "(2)(3)",
        "2 3",
        "2.5",
        ".5",
        "2.",
        "1e3",
        "0x10",
        "1_000",
        "1,000",
        "07",
        "00",
        "1/0",
        "1/(2-2)",
        "0/0",
        "1=1",
        "2*4-3=5",
        "2\n+3",
        "2\u00a0+3",
        "2\u00d73",
        "2\u00f73",
        "2\u22123",
        "\u0663+\u0664",
        "\uff11+\uff12",
        "\u00b2",
        "5%3",
        "~1",
        "1<2",
        "x",
        "True",
        "__import__('os')",
        r"\boxed{1+2}",
        "[1]",
        "1 if 1 else 2",
        "\x00",
        "\ud800",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    assert evaluate(text) is None


@given(_EXPRESSIONS)
@settings(max_examples=300)
def test_results_equal_pythons(text: str) -> None:
    evaluation = evaluate(text)
    try:
        value = eval(re.sub(r"\d+", r"Fraction(\g<0>)", text), {"Fraction": Fraction})
    except ZeroDivisionError:
        assert evaluation is None
        return
    assert evaluation is not None
    assert evaluation.value == value
    assert evaluation.numbers == tuple(map(int, re.findall(r"\d+", text)))
    assert evaluation.operators == set(text) & set("+-*/")


@given(st.text(alphabet="0123456789+-*/() .\t\n", max_size=30))
@settings(max_examples=500)
def test_accepted_texts_are_python_expressions(text: str) -> None:
    evaluation = evaluate(text)
    if evaluation is not None:
        assert eval(re.sub(r"\d+", r"Fraction(\g<0>)", text.strip()), {"Fraction": Fraction}) == evaluation.value


def test_the_length_bound_is_exact() -> None:
    longest = "1" * MAX_EXPRESSION_CHARS
    assert evaluate(longest) is not None
    assert evaluate(longest + "1") is None


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9",
        "9*" * 500_000 + "9",
        "9" * 1_000_000,
        "(" * 2_000 + "1" + ")" * 2_000,
        "(" * 127 + "1" + ")" * 127,
        "9/" * 127 + "9",
        "(" * 256,
        ")" * 256,
        " " * 1_000_000 + "1",
    ],
)
def test_hostile_expressions_take_bounded_time(text: str) -> None:
    start = time.process_time()
    evaluate(text)
    assert time.process_time() - start < 0.5
