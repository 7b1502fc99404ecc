"""Tests of parsing boxed answers, by our rule and the first d1's."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.first_d1 import parsers as d1_parsers
from rewards.parsing.boxed import last_boxed

_PIECES = ["\\boxed", "\\fbox", "{", "}", " ", "$", "1", "\\{", "\\}"]
_LATEX = st.lists(st.sampled_from(_PIECES), max_size=30).map("".join)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{4} and \boxed{ 5 }.", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{3} then \boxed{4", "3"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{3 \boxed{4", None),
        ("no box", None),
        (r"\boxed 5 {6}", None),
    ],
)
def test_the_last_box_that_closes_is_the_answer(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    "text", ["\\boxed{" * 100_000, "\\boxed" * 100_000, "{" * 500_000, "\\boxed{1" + "}" * 300_000]
)
def test_hostile_boxes_take_linear_time(text: str) -> None:
    start = time.process_time()
    last_boxed(text)
    d1_parsers.boxed(text)
    assert time.process_time() - start < 2.0


def _published(text: str) -> str | None:
    """Reimplement the first d1's parser from its description: scan characters with a brace counter."""
    if "\\boxed " in text:
        return re.split(r"\\boxed ", text)[-1].split("$")[0]
    start = max(text.rfind("\\boxed"), -1)
    if start < 0:
        start = text.rfind("\\fbox")
    if start < 0:
        return text
    opened = 0
    for length, character in enumerate(text[start:], start=1):
        opened += {"{": 1, "}": -1}.get(character, 0)
        if character == "}" and not opened:
            box = text[start : start + length]
            return box[7:-1] if box[:7] == "\\boxed{" else box
    return None


@given(_LATEX)
def test_the_first_d1s_box_rule_is_reproduced(text: str) -> None:
    assert d1_parsers.boxed(text) == _published(text)
