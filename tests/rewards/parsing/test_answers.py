"""Tests of answer extraction: it equals d1's regular expression, in linear time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rewards.parsing.answers import ascii_digits, last_answer

_PIECES = st.sampled_from(["<answer>", "</answer>", "<answer", ">", "x", " ", "\n", "7", "<reasoning>"])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1+2</answer>", "1+2"),
        ("<answer>\n 1+2 \n</answer>", "1+2"),
        ("<answer>1</answer> no: <answer>2</answer>", "2"),
        ("<answer>1\n2</answer>", "1\n2"),
        ("<answer></answer>", ""),
        ("<answer>1</answer><answer>2", "1"),
        ("<answer>1</answer></answer>", "1"),
        ("<answer>1<answer>2</answer>", "1<answer>2"),
        ("</answer>1<answer>", None),
        ("<answer>1", None),
        ("<Answer>1</Answer>", None),
        ("< answer>1</answer>", None),
        ("1", None),
        ("", None),
    ],
)
def test_last_answer_is_the_last_closed_pair(text: str, answer: str | None) -> None:
    assert last_answer(text) == answer


@given(st.lists(_PIECES, max_size=40).map("".join))
@example("<answer>1<answer>2</answer>3</answer>")
def test_last_answer_equals_d1s_regular_expression(text: str) -> None:
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    assert last_answer(text) == (found[-1].strip() if found else None)


@pytest.mark.parametrize("piece", ["<answer>", "</answer>", "<answer>1</answer>", "<"])
def test_last_answer_takes_linear_time(piece: str) -> None:
    start = time.process_time()
    last_answer(piece * (2_000_000 // len(piece)))
    assert time.process_time() - start < 2.0


def test_ascii_digits_keeps_only_the_ten_digits() -> None:
    assert ascii_digits("1 2-3\n|4|x.5 ² ٣ \uff17 ① 6") == "123456"
