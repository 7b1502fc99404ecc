"""Tests of our fast version of the first d1's maths grading against a slow reimplementation."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rewards.first_d1.maths import equivalent, gsm8k_number, math_answer
from rewards.first_d1.parsers import boxed
from rewards.first_d1.training_rewards import gsm8k_parts, math_parts


def _texts(*pieces: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(pieces), max_size=24).map("".join)


_NUMBERS = _texts("\\boxed{", "}", "\n", "...", ".", "1", "1,0", "-", "1_0", "inf", "nan", "1e3", "x", " ", "\u0661")
_ANSWERS = st.tuples(_NUMBERS, _NUMBERS, _NUMBERS).map(lambda t: f"{t[0]}<answer>{t[1]}</answer>{t[2]}")
_TAGS = _texts(
    "<reasoning>", "<reasoning>\n", "</reasoning>", "\n</reasoning>\n", "<answer>", "\n<answer>\n", "</answer>",
    "\n</answer>", "\n</answer>\n", "<answer>\n", "\n", " ", "4", "x", "\boxed", "\\boxed{4}",
)  # fmt: skip
_LATEX = _texts(
    "\\frac", "\\dfrac", "\\tfrac", "\\sqrt", "{", "}", "1", "23", "/", "=", "x", " ", ".", "0.5", "\\text{ ", "cm",
    "\\!", "\\\\", "\\left", "\\right", "^\\circ", "^{\\circ}", "\\$", "\\%", "\n", "-", "+", "_", "\u0662", "0",
)  # fmt: skip


def _published_number(text: str) -> float | None:
    for found in re.findall(r"\\boxed{(.*?)}", text):
        content = found.strip()
        if content and content != "..." and not re.match(r"^\.+$", content):
            try:
                return float(content)
            except ValueError:
                if numbers := re.findall(r"-?\d+\.?\d*", content):
                    return float(numbers[0])
    if match := re.search(r"<answer>(.*?)</answer>", text, re.DOTALL):
        answer = match.group(1).strip()
        if answer:
            try:
                return float(answer)
            except ValueError:
                if numbers := re.findall(r"-?\d+\.?\d*", answer):
                    return float(numbers[-1])
    return None


@given(st.one_of(_NUMBERS, _ANSWERS))
@settings(max_examples=400)
@example("\\boxed{\\boxed{3}")
@example("\\boxed{\n}\\boxed{....}<answer>1,000</answer>")
@example("\\boxed{1,000}")
@example("\\boxed{1_000}")
@example("\\boxed{inf}")
@example("\\boxed{-}\\boxed{ 3.}")
def test_numbers_are_parsed_like_d1(text: str) -> None:
    # Compare as text, because nan is not equal to itself.
    assert repr(gsm8k_number(text)) == repr(_published_number(text))


def _published_math_answer(text: str) -> str | None:
    answer = boxed(text)  # restated in test_boxed.py
    if not answer and (match := re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)):
        answer = match.group(1).strip()
    return answer


@given(_texts("\\boxed{", "\\boxed{}", "\\boxed ", "}", "$", "<answer>", "</answer>", "1", "\n"))
@example("")
@example("\\boxed{<answer>1</answer>")
@example("\\boxed{}<answer>1</answer>")
def test_math_answers_are_parsed_like_d1(text: str) -> None:
    assert math_answer(text) == _published_math_answer(text)


def _published_spelling(text: str) -> str:  # noqa: C901
    """Reimplement `strip_string` step by step."""
    for old, new in [("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac")]:
        text = text.replace(old, new)
    for old in ["\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"]:
        text = text.replace(old, "")
    if "\\text{ " in text:
        splits = text.split("\\text{ ")
        assert len(splits) == 2
        text = splits[0]
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if len(text) == 0:
        return text
    if text[0] == ".":
        text = "0" + text
    if len(text.split("=")) == 2 and len(text.split("=")[0]) <= 2:
        text = text.split("=")[1]
    if "\\sqrt" in text:
        rooted = text.split("\\sqrt")[0]
        for piece in text.split("\\sqrt")[1:]:
            rooted += "\\sqrt{" + piece[0] + "}" + piece[1:] if piece[0] != "{" else "\\sqrt" + piece
        text = rooted
    text = _published_fractions(text.replace(" ", ""))
    if text == "0.5":
        text = "\\frac{1}{2}"
    if len(text.split("/")) == 2:
        above, below = text.split("/")
        if text == f"{int(above)}/{int(below)}":
            return "\\frac{" + str(int(above)) + "}{" + str(int(below)) + "}"
    return text


def _published_fractions(text: str) -> str:
    new, *pieces = text.split("\\frac")
    for piece in pieces:
        new += "\\frac"
        if piece[0] == "{":
            new += piece
        elif len(piece) < 2:
            return text
        elif piece[1] != "{":
            new += "{" + piece[0] + "}{" + piece[1] + "}" + piece[2:]
        else:
            new += "{" + piece[0] + "}" + piece[1:]
    return new


def _published_equivalence(a: str, b: str) -> bool:
    try:
        return _published_spelling(a) == _published_spelling(b)
    except (AssertionError, IndexError, ValueError):
        return a == b


@given(_LATEX, st.one_of(st.none(), _LATEX))
@settings(max_examples=1000)
@example("1/x", None)
@example("\\sqrt", "\\sqrt")
@example("\\frac", "\\frac")
@example("\\frac1", "\\frac1")
@example("01/2", "\\frac{1}{2}")
@example(".5", "\\frac12")
@example("5\\text{ cm}", "5")
@example("x=5", "5")
@example("a b=5", "5")
def test_equivalence_equals_d1s(a: str, other: str | None) -> None:
    variants = [other] if other is not None else [a, a.replace(" ", ""), a.replace("dfrac", "frac"), a + " "]
    for b in variants:
        assert equivalent(a, b) == _published_equivalence(a, b)
        try:
            spelled = _published_spelling(a)
        except (AssertionError, IndexError, ValueError):
            continue
        assert equivalent(spelled, a) == _published_equivalence(spelled, a)


def _published_parts(text: str, gold: str) -> dict[str, float]:
    count = 0.0
    if text.count("<reasoning>\n") == 1:
        count += 0.125
    if text.count("\n</reasoning>\n") == 1:
        count += 0.125
    if text.count("\n<answer>\n") == 1:
        count += 0.125
        *_, rest = text.split("\n</answer>\n")
        count -= len(rest) * 0.001
    if text.count("\n</answer>") == 1:
        count += 0.125
        *_, rest = text.split("\n</answer>")
        count -= (len(rest) - 1) * 0.001
    *_, answer = text.split("<answer>")
    answer, *_ = answer.split("</answer>")
    answer = answer.strip()
    soft = re.match(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", text)
    strict = re.match(r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$", text)
    return {
        "xml_count": count,
        "soft_format": 0.5 if soft else 0.0,
        "strict_format": 0.5 if strict else 0.0,
        "integer": 0.5 if answer.isdigit() else 0.0,
        "correct": 2.0 if answer == gold else 0.0,
    }


_STRICT = "<reasoning>\nx\n</reasoning>\n<answer>\n4\n</answer>\n"


@given(_TAGS)
@settings(max_examples=1000)
@example(_STRICT)
@example(_STRICT + "\n")
@example(_STRICT + "\n\n")
@example(_STRICT.replace("x", "x\nx"))
@example("<reasoning>x</reasoning><answer>\n</reasoning>\n\n<answer>4</answer>")
@example("<reasoning>x</reasoning><answer>4</reasoning><answer>4</answer>")
@example("<reasoning>x</reasoning>\n<answer>4\n</answer>")
@example("\n</answer>\n</answer>\n\n<answer>\n")
@example("\u0664")
def test_gsm8k_rewards_equal_d1s(text: str) -> None:
    assert gsm8k_parts(text, "4") == _published_parts(text, "4")


def test_gsm8k_rewards_have_d1s_accidental_length_penalty() -> None:
    assert sum(gsm8k_parts(_STRICT, "4").values()) == pytest.approx(3.5)
    soft_too = "<reasoning>\nx</reasoning>"
    assert gsm8k_parts(soft_too, "4")["soft_format"] == 0.0
    shorter, longer = (gsm8k_parts(_STRICT.strip().replace("x", "x" * n), "4")["xml_count"] for n in (100, 600))
    assert shorter - longer == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "correct", "form"),
    [
        ("<answer>\\boxed{4}</answer>", 2.0, 0.75),
        ("<answer>4", 0.0, 0.75),
        ("\\boxed{4}", 2.0, 0.25),
        ("4", 2.0, 0.25),
        ("5", 0.0, 0.25),
        ("\\boxed{4", 0.0, 0.25),
        ("<answer>\boxed</answer>", 0.0, 1.0),
        ("<answer>4</answer>\boxed", 0.0, 0.75),
        ("\boxed", 0.0, 0.5),
        ("", 0.0, 0.25),
    ],
)
def test_math_rewards_equal_d1s(text: str, correct: float, form: float) -> None:
    assert math_parts(text, "4") == {"correct": correct, "format": form}


_HOSTILE = {
    "boxes": "\\boxed{" * 150_000,
    "boxes on lines": "\\boxed{\n" * 150_000,
    "digits": "\\boxed{" + "9" * 1_000_000 + "}",
    "dotted": "<answer>" + "1." * 500_000 + "</answer>",
    "minus": "<answer>" + "-" * 1_000_000 + "</answer>",
    "seams": "<reasoning>" + "</reasoning><answer>" * 50_000,
    "seams on lines": "<reasoning></reasoning>" + " " * 500_000 + "<answer>" * 50_000,
    "ends of reasoning": "<reasoning>" + "</reasoning> " * 80_000,
    "answers": "<answer>" * 125_000,
    "fractions": "\\frac" * 200_000,
    "fractions of digits": "\\frac12" * 150_000,
    "roots": "\\sqrt2" * 150_000,
    "slash": "9" * 500_000 + "/" + "9" * 500_000,
    "equals": "=" * 1_000_000,
    "surrogate": "\ud800" * 1_000,
    "nul": "\x00" * 1_000_000,
}
_READERS: list[Callable[[str], object]] = [
    gsm8k_number,
    math_answer,
    lambda text: gsm8k_parts(text, "4"),
    lambda text: math_parts(text, "4"),
    lambda text: equivalent(text, "4"),
]


@pytest.mark.parametrize("text", _HOSTILE.values(), ids=list(_HOSTILE))
def test_a_hostile_megabyte_takes_linear_time(text: str) -> None:
    for read in _READERS:
        start = time.process_time()
        read(text)
        assert time.process_time() - start < 1.0
