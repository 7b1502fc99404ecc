"""Numbers as they are written."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.reading.quantities import MAX_QUANTITY_CHARS, read_quantity


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
        # Several numbers, none, or such as nobody can be sure of.
        ("", None),
        ("...", None),
        ("eighteen", None),
        ("86, 42", None),
        ("2*9", None),
        ("5 + 13", None),
        ("10^3", None),
        ("x^2", None),
        ("5^n", None),
        ("5 / x", None),
        ("1e3", None),
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
def test_a_quantity_is_the_one_number_of_a_text(text: str, value: str | None) -> None:
    assert read_quantity(text) == (None if value is None else Fraction(value))


@given(st.fractions(), st.sampled_from(["{}", "${}", " {} dollars.", "x = {}", "\\text{{{}}}"]))
def test_what_is_written_is_read_exactly(value: Fraction, form: str) -> None:
    text = form.format(value)
    assert len(text) > MAX_QUANTITY_CHARS or read_quantity(text) == value


@given(st.text(), st.text(alphabet="0123456789.,/-$%^:{}\\ =\n"))
def test_no_text_makes_it_raise(text: str, numeric: str) -> None:
    for hostile in (text, numeric):
        read_quantity(hostile)


@pytest.mark.parametrize("piece", ["1,000", "1/", "\\frac{1}{2}", "\\text{", "{,}", "-", "1 ", ",000", "9", "="])
def test_hostile_quantities_take_microseconds(piece: str) -> None:
    text = (piece * MAX_QUANTITY_CHARS)[:MAX_QUANTITY_CHARS]
    start = time.process_time()
    read_quantity(text)
    assert time.process_time() - start < 0.05
