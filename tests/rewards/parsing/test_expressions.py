"""Tests of random expressions: text and steps evaluate to the stated value."""

from __future__ import annotations

from random import Random

import pytest

from rewards.parsing.arithmetic import Operator, evaluate
from rewards.parsing.expressions import (
    BinaryOperation,
    Expression,
    count_correct_steps,
    random_expression,
    steps_of,
    text_of,
    value_of,
)


def _join(left: Expression, operator: Operator, right: Expression) -> BinaryOperation:
    value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}[operator](
        value_of(left), value_of(right)
    )
    return BinaryOperation(value, left, operator, right)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (_join(_join(3, "+", 7), "*", 9), "(3+7)*9"),
        (_join(3, "+", _join(7, "*", 9)), "3+7*9"),
        (_join(3, "+", _join(7, "-", 9)), "3+7-9"),
        (_join(3, "-", _join(7, "-", 9)), "3-(7-9)"),
        (_join(_join(3, "-", 7), "-", 9), "3-7-9"),
        (_join(8, "/", _join(4, "/", 2)), "8/(4/2)"),
        (_join(8, "/", _join(4, "*", 2)), "8/(4*2)"),
        (_join(8, "*", _join(4, "/", 2)), "8*4/2"),
        (_join(8, "/", _join(4, "-", 2)), "8/(4-2)"),
    ],
)
def test_texts_have_only_the_parentheses_they_need(expression: Expression, text: str) -> None:
    assert text_of(expression) == text


def test_steps_are_in_the_order_of_evaluation_and_show_signs() -> None:
    assert steps_of(_join(9, "-", _join(3, "-", 7))) == ["3-7 = -4", "9-(-4) = 13"]


@pytest.mark.parametrize(
    ("text", "num_right"),
    [
        ("2*4=8;8-3=5", 2),
        ("2*4 = 8\n8-3 = 5", 2),
        ("2-4=-2;(-2)+3=1", 2),
        ("4/2=2;2*3=6", 2),
        ("2*4=8;8-3=4", 1),
        ("2*4=8;2+3=5", 1),
        ("2*4=8;and 8-3=5", 1),
        ("2*4=8;8-3", 1),
        ("2*4=8;;8-3=5", 1),
        ("2*4=8", 1),
        ("2*4=8;8-3=5;5+0=5", 2),
        ("1+1=2;2+2=4", 0),
        ("2*2=4;4-3=1", 0),
        ("3/2=1;1*4=4", 0),
        ("3/0=0", 0),
        ("so 2*4=8;8-3=5", 0),
        ("\u0662*4=8", 0),
        ("2*4=" + "9" * 5000, 0),
        ("", 0),
    ],
)
def test_right_steps_are_true_and_use_what_is_left(text: str, num_right: int) -> None:
    assert count_correct_steps(text, [2, 3, 4]) == num_right


def test_texts_evaluate_to_their_value_with_each_number_used_once() -> None:
    rng = Random(0)
    num_made = 0
    for _ in range(3_000):
        numbers = [rng.randint(1, 12) for _ in range(rng.randint(2, 6))]
        expression = random_expression(rng, numbers, ["+", "-", "*", "/"])
        if expression is None:
            continue
        num_made += 1
        evaluation = evaluate(text_of(expression))
        assert evaluation is not None
        assert evaluation.value == value_of(expression)
        assert sorted(evaluation.numbers) == sorted(numbers)
        assert len(steps_of(expression)) == len(numbers) - 1
        assert steps_of(expression)[-1].endswith(f" = {value_of(expression)}")
        assert count_correct_steps(";".join(steps_of(expression)), numbers) == len(numbers) - 1
    assert num_made > 1_000


def test_only_the_given_operators_are_used() -> None:
    rng = Random(0)
    texts = [text_of(e) for _ in range(100) if (e := random_expression(rng, [5, 6, 7], ["+", "*"])) is not None]
    assert set("".join(texts)) == set("567+*()")


def test_divisions_with_a_remainder_or_by_zero_are_refused() -> None:
    rng = Random(0)
    assert all(random_expression(rng, [5, 3], ["/"]) is None for _ in range(20))
    assert all(random_expression(rng, [0, 0], ["/"]) is None for _ in range(20))
