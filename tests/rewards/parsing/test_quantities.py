"""Tests of parsing written numbers: fractions, signs, powers, units."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.parsing.quantities import MAX_QUANTITY_CHARS, final_quantity, read_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", "18"),
        (" 18. ", "18"),
        ("18.00", "18"),
        ("18.5", "37/2"),
        (".5", "1/2"),
        ("-3", "-3"),
        ("\u22123", "-3"),
        ("$18", "18"),
        ("-$18", "-18"),
        ("\\$8,400", "8400"),
        ("1,000", "1000"),
        ("1{,}000", "1000"),
        ("1\\,000", "1000"),
        ("1,234,567.5", "2469135/2"),
        ("60\\%", "60"),
        ("50%", "50"),
        ("18 dollars", "18"),
        ("18 dollars.", "18"),
        ("18km", "18"),
        ("\\text{18 hours}", "18"),
        ("18\\text{ hours}", "18"),
        ("The answer is 18.", "18"),
        ("x = 18", "18"),
        ("5 + 13 = 18", "18"),
        ("\\frac{3}{6}", "1/2"),
        ("2\\frac{1}{2}", "5/2"),
        ("1/2", "1/2"),
        ("-1/2", "-1/2"),
        ("2 1/2 cups", "5/2"),
        ("1/2.", "1/2"),
        ("It is 2 1/2.", "5/2"),
        ("-\\frac{1}{2}", "-1/2"),
        ("x = - \\frac{1}{2}", "-1/2"),
        ("-\\left(\\dfrac{1}{2}\\right)", "-1/2"),
        ("-\\text{5}", "-5"),
        ("-\\text{\\frac{1}{2}}", "-1/2"),
        ("-{5}", "-5"),
        ("-\\,5", "-5"),
        ("-\\$5", "-5"),
        ("2:00 pm", "2"),
        ("\\boxed{}32", "32"),
        ("**18**", "18"),
        ("18\n</answer", "18"),
        ("007", "7"),
        # Several numbers, none, or ambiguous ones.
        ("", None),
        ("...", None),
        ("eighteen", None),
        ("86, 42", None),
        ("2*9", None),
        ("5 + 13", None),
        ("x^2", None),
        ("5^n", None),
        ("5 / x", None),
        ("1/0", None),
        ("1/2/3", None),
        ("1/2.5", None),
        ("1/2./3", None),
        ("3-\\frac{1}{2}", None),
        ("3-\\text{5}", None),
        ("1.2.3", None),
        ("1,00", None),
        ("1,0000", None),
        ("1,000,00", None),
        ("2:30", None),
        ("3-5", None),
        ("2$3", None),
        ("5%3", None),
        ("2\\,3", None),
        ("2 * 3", None),
        ("18 dollars for 3 days", None),
        ("1_000", None),
        ("inf", None),
        ("nan", None),
        ("\u0661\u0662", None),
        ("\uff11", None),
        ("\u00b2", None),
        ("CO2", None),
        ("\ud800", None),
        ("9" * 1_000_000, None),
    ],
)
def test_a_quantity_is_the_only_number_of_a_text(text: str, value: str | None) -> None:
    assert read_quantity(text) == (None if value is None else Fraction(value))


def _shown(value: str | None) -> Fraction | None:
    return None if value is None else Fraction(value)


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        # Scales.
        (
            "3000000",
            [
                "$3 million",
                "3 million dollars",
                "3-million",
                "$3m",
                "$3M",
                "3M",
                "3MM",
                "3 mio",
                "3.0 Million",
                "30 lakh",
            ],
        ),
        ("18000", ["18k", "18K", "$18k", "18 k", "18 thousand", "18 thousands of dollars", "$18 K"]),
        ("3000000000", ["3bn", "3 bn", "$3b", "3B", "3 billion", "3 thousand million", "3 Mrd"]),
        ("24", ["2 dozen", "2 dozen eggs", "2 dozens"]),
        ("500000", ["1/2 million", "\u00bd million", "5 hundred thousand"]),
        # Fractions.
        ("3/2", ["1\u00bd", "1 \u00bd", "1\u00bd cups", "1 1\u20442", "1 and 1/2", "1 and a half", "1\\frac12"]),
        ("-1/2", ["-\u00bd", "\u2212\u00bd", "-\\frac12", "\\frac{-1}{2}", "-1\u22152"]),
        ("7/8", ["\u215e", "\\tfrac78", "7/8 of the cake", "7/8th", "$\\dfrac{7}{8}$"]),
        ("5/2", ["2\u00bd", "2 and a half hours", "2 & 1/2"]),
        # Signs.
        (
            "-5",
            [
                "\u22125",
                "\u20135",
                "\ufe635",
                "minus 5",
                "negative 5",
                "-$5",
                "$-5",
                "- $5",
                "x = - 5",
                "(\u22125)",
                "-(5)",
            ],
        ),
        (
            "5",
            [
                "+5",
                "US$5",
                "USD 5",
                "USD5",
                "5 USD",
                "Rs. 5",
                "5\u20ac",
                "\u00a35",
                "5\u00a2",
                "5\u5143",
                "5th",
                "about 5",
                "~5",
            ],
        ),
        # Powers of ten and digits in groups.
        (
            "1500",
            [
                "1.5e3",
                "1.5\u00d710^3",
                "1.5 \\times 10^{3}",
                "1.5 x 10\u00b3",
                "1.5 \\cdot 10^3",
                "$1.5\\times10^3$",
                "15*10**2",
            ],
        ),
        (
            "1000",
            ["10^3", "10\u00b3", "1E3", "10^{3} dollars", "1 000", "1'000", "1\u2019000", "1\u202f000", "1,\\!000"],
        ),
        ("1234567", ["1 234 567", "1'234'567", "1\\,234\\,567", "1,234,567"]),
        # Units, rates, markup.
        (
            "18",
            [
                "18 m",
                "18 m^2",
                "18 ft\u00b2",
                "18m\u00b2",
                "18 \\text{ ft}^2",
                "18 cm^{3}",
                "18 m/s^2",
                "18 cm3",
                "18 feet squared",
            ],
        ),
        (
            "18",
            [
                "18\u00b0",
                "18^\\circ",
                "18\u00b0C",
                "18/day",
                "$18/hour",
                "18 miles/hour",
                "18-hour",
                "18 kWh",
                "18%",
                "18 percent",
            ],
        ),
        (
            "18",
            [
                "__18__",
                "*18*",
                "`18`",
                "$18$",
                "$\\$18$",
                "\\(18\\)",
                "\\[ 6 + 12 = 18 \\]",
                "<b>18</b>",
                "18<|eot_id|>",
                "=> 18",
            ],
        ),
        (
            "18",
            [
                "boxed{18}",
                "\\boxed{18",
                "18 \u2013 that is all",
                "18, as shown",
                "18 dollars!",
                "#### 18",
                "Answer: 18",
                "Answer:\n- 18 dollars",
            ],
        ),
        # Parts of another number, or unknown notation.
        (
            None,
            [
                "18m",
                "5b",
                "$3 mil",
                "3 Millionen",
                "3 mille",
                "18 thousandths",
                "18 (in thousands)",
                "3\u4e07",
                "3 grand",
            ],
        ),
        (
            None,
            [
                "half of 18",
                "5 half",
                "18 halves",
                "3 quarters",
                "3/5ths",
                "a 5th",
                "twice 5",
                "5 squared",
                "5\u2030",
                "5!",
            ],
        ),
        (
            None,
            ["5-", "5+", "--5", "+-5", "\u00b15", "5 \\pm 1", "(5)", "($5)", "x - 5", "x -5", "\u20145", "Total - 18"],
        ),
        (
            None,
            [
                "5 or 6",
                "not 5",
                "isn't 5",
                "at least 5",
                "more than 5",
                "> 5",
                "\u22655",
                "x \u2260 5",
                "x != 5",
                "~~18~~",
            ],
        ),
        (
            None,
            ["x = 5, y = 6", "x = 5 or x = 6", "3 to 5", "3\u20135", "3:2", "18 for two boys", "twenty-one", "5 -> 6"],
        ),
        (
            None,
            [
                "5x",
                "5 x",
                "5i",
                "2\\pi",
                "2pi",
                "5\u03c0",
                "\\sqrt{5}",
                "\u221a5",
                "5x^2",
                "5s^2",
                "5\u00b2",
                "2^5",
                "x+5",
                "5*",
                "5/x",
            ],
        ),
        (
            None,
            [
                "0.333...",
                "0.333\u2026",
                "0.\\overline{3}",
                "0.3\u0305",
                "1.000,50",
                "1.000.000",
                "1,5",
                "1 000/2",
                "12 34",
            ],
        ),
        ("18", ["2 x 9 = 18", "x + y = 18", "f(3) = 18", "x_1 = 18", "x = 2 * 9 = 18", "C(5, 2) = 18"]),
        (
            None,
            ["2x = 18", "x^2 = 18", "-x = 18", "x/2 = 18", "x + 1 = 18", "3 - n = 18", "\u221ax = 18", "x\u00b2 = 18"],
        ),
        (
            None,
            ["18 gross", "18 scores", "18 tens", "18 quintillion", "18 zillion", "18 twentieths", "18cr", "all but 18"],
        ),
        (
            "18",
            [
                "\u200b18\ufeff",
                "\u2234 18",
                "18 \u03a9",
                "18 N\u00b7m",
                "18 \u2109",
                "18 \\frac{\\text{m}}{\\text{s}}",
                "\\underline{18}",
                "\\color{red}{18}",
                "\\bf 18",
            ],
        ),
        (None, ["1\uff12", "5\u2460", "5\u0661", "18 points in 3", "5 3/2", "18 and counting plus tax"]),
    ],
)
def test_a_number_is_parsed_completely_or_not_at_all(value: str | None, texts: list[str]) -> None:
    assert {text: read_quantity(text) for text in texts} == dict.fromkeys(texts, _shown(value))


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("\\boxed{3} million", "3 million", "3000000"),
        ("<answer>$\\boxed{3}$ \\text{ million}</answer>", "3 \\text{ million}", "3000000"),
        ("It is $-\\boxed{5}$.", "-5", "-5"),
        ("x = - \\boxed{5}", "= - 5", "-5"),
        ("\\boxed{1}\u00bd cups", "1\u00bd", "3/2"),
        ("\\boxed{2} and a half", "2 and a half", "5/2"),
        ("\\boxed{5} \\times 10^{3}.", "5 \\times 10^{3}", "5000"),
        ("\\boxed{18}k", "18k", "18000"),
        ("\\boxed{5}^2", "5^2", None),
        ("- \\boxed{18} dollars, of 20", "18", "18"),
        ("\\boxed{18}!", "18", "18"),
        ("0.\\boxed{3}", "0.3", "3/10"),
        ("\\boxed{3}.5", "3.5", "7/2"),
        ("\\boxed{3},000", "3,000", "3000"),
        ("1/\\boxed{3}", "1/3", "1/3"),
        ("\\frac{\\boxed{3}}{4}", "\\frac{3", None),
        ("\\sqrt{\\boxed{3}}", "\\sqrt{3", None),
        ("\\boxed{3}\\pi", "3\\pi", None),
        ("\\boxed{3}x", "3x", None),
        ("\\textbf{\\boxed{3}}, so", "3", "3"),
        ("\\boxed{4} or \\boxed{3}", "4 or 3", None),
        ("$\\boxed{4}$, $\\boxed{3}$", "4 or 3", None),
        ("\\boxed{4} eggs, \\boxed{3}", "3", "3"),
        ("<answer>18 apples</answer>", "18 apples", "18"),
        ("<answer>\\boxed{}</answer>", "\\boxed{}", None),
        ("18", None, None),
    ],
)
def test_signs_and_scales_around_a_box_count(text: str, answer: str | None, value: str | None) -> None:
    assert final_quantity(text) == answer
    assert (None if answer is None else read_quantity(answer)) == _shown(value)


@given(st.fractions(), st.sampled_from(["{}", "${}", " {} dollars.", "x = {}", "\\text{{{}}}"]))
def test_written_numbers_are_parsed_exactly(value: Fraction, form: str) -> None:
    text = form.format(value)
    assert len(text) > MAX_QUANTITY_CHARS or read_quantity(text) == value


@given(st.text(), st.text(alphabet="0123456789.,/-$%^:{}\\ =\n"))
def test_read_quantity_never_raises(text: str, numeric: str) -> None:
    for hostile in (text, numeric):
        read_quantity(hostile)


@pytest.mark.parametrize("piece", ["1,000", "1/", "\\frac{1}{2}", "\\text{", "{,}", "-", "1 ", ",000", "9", "="])
def test_hostile_quantities_take_bounded_time(piece: str) -> None:
    text = (piece * MAX_QUANTITY_CHARS)[:MAX_QUANTITY_CHARS]
    start = time.process_time()
    read_quantity(text)
    assert time.process_time() - start < 1.0
