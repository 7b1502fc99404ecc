"""Tests of maths answer parsing: markup, numbers, units and scales, each with the expected verdict."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from rewards import Outcome
from rewards.maths import MathVerifier, judge_answer
from rewards.maths.answer_parser import read_pair


@pytest.fixture(scope="module")
def maths() -> Iterator[MathVerifier]:
    maths = MathVerifier()
    yield maths
    maths.close()


_FIVE = r"""
**5** | __5__ | *5* | ***5*** | `5` | ~~5~~ | _5_ | <b>5</b> | ### 5 | > **5** | "5" | \(5\) | \[5\] | $$5$$ | $5$. | 5.
5; | **$5$** | **\(5\)**. | \boxed{5} | \boxed{\boxed{5}} | \fbox{5} | \boxed{5\text{ cm}} | \boxed{x=5} | \boxed 5
(5) | {5} | \text{5} | \mathbf{5} | \bm{5} | \text{5 cm} | +5 | 5.0 | 05 | \frac{5}{1} | x = 5 | n=5. | = 5
\approx 5 | The answer is 5. | The answer is: **5** | Answer: 5 | **Answer:** 5 | **Final Answer**: $5$ | Answer = 5
So the answer is \(5\). | Therefore, the final answer is 5. | There are 5 ways. | The area is 5 cm^2.
5 is the answer | \text{Answer: }5 | 5 cm | 5cm | 5\text{ cm} | 5~\text{cm} | 5\,\mathrm{cm} | 5 \mathrm{~cm}^2
5 {\rm cm} | 5 \mbox{ cm}^2 | 5 in^2 | 5 in. | 5 sq. ft. | 5 \text{ ft}^2 | 5 square inches | 5 inches squared
5 cubic feet | 5 (cm) | 5 m/s | 5 m/s^2 | 5 \frac{\text{m}}{\text{s}^2} | 5 miles per hour | 5 mph
5 \text{ m} \cdot \text{s}^{-1} | 5 kg/m^3 | 5 units | 5 \text{ square units} | 5 units^2 | 5 apples
5 \text{ red balls} | 5 people | 5 years old | 5 hours | 5 m | 5\text{th} | 5^\circ | 5^{\circ} | 5 degrees
5^\circ\text{C} | \$5 | $5 | US\$5 | 5 dollars | 5 USD | Rs. 5 | \$5 per hour | \$5/hour | 5\% | 5 percent
5 \text{ \%} | **5** cm | \underline{5}
"""
_NOT_FIVE = r"""
-5 | 5! | 5^2 | 5x | 5t | 5i | 5, 6 | 5 or 6 | 5 \text{ or } 6 | 5 \pm 1 | not 5 | The answer is not 5 | 5 million
5k | 5 dozen | 5 halves | 5 tenths | 5 thousandths | 5 hundred | 5 squared | 5 factorial | 5 + 1 | 5 cm + 1 cm | 1/5
5 1/2 | 5\frac12 | 5\pi | 5 ft 2 in | 5:30 | 5 hours 30 minutes | 5 \times 10^2 | 5e2 | \sqrt5 | negative 5 | x < 5
at least 5 | (5, 5) | 5 lakh | 5M | 5 bn | 5 \mod 3 | 5 quarters | 5 thousand dollars | \$5 million | 5.5 cm | 5 - 10
> 5 | \{5, 6\} | 5 mil | 5 score | 5^{10}
"""
_KINDS: dict[str, list[tuple[str, str, bool]]] = {
    "small and large numbers": [
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", False),
        (r"\frac{1}{2^{99}}", "2^{-99}", True),
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}", False),
        (r"\frac{2004!}{2003!}", "2004", True),
        ("0.0000001", "0.0000002", False),
        ("0.0000001", "1e-7", True),
        ("1", "1.00000000000000000001", False),
        ("2^{64}", "18446744073709551616", True),
        ("2^{64}", "18446744073709551615", False),
        ("2^{100000}", "4^{50000}", True),
        ("0", "10^{-20}", False),
        (r"\frac{\pi}{10^{20}}", r"\frac{\pi}{10^{21}}", False),
        (r"\sqrt{10^{100}+1}", "10^{50}", False),
        (r"\ln(1+10^{-20})", r"\ln(1+10^{-21})", False),
        (r"\infty", "3", False),
        (r"\infty", r"-\infty", False),
    ],
    "within other expressions": [
        ("0.0000001x", "0.0000002x", False),
        ("0.5x^2", r"\frac{x^2}{2}", True),
        ("10^{-20}x", r"2 \cdot 10^{-20}x", False),
        ("x^{2^{99}}", "x^{2^{98}}", False),
        ("x^{2^{99}}", r"x^{2 \cdot 2^{98}}", True),
        ("(1, 10^{-9})", "(1, 10^{-10})", False),
        ("(0.5, 0.25)", r"(\frac12, \frac14)", True),
        ("[0, 10^{-9}]", "[0, 10^{-8}]", False),
        (r"\{1, 10^{-9}\}", r"\{10^{-9}, 1\}", True),
        (r"\{1, 10^{-9}\}", r"\{10^{-8}, 1\}", False),
        (r"\begin{pmatrix}10^{-9}\\1\end{pmatrix}", r"\begin{pmatrix}10^{-8}\\1\end{pmatrix}", False),
        (r"\begin{pmatrix}0.5\\1\end{pmatrix}", r"\begin{pmatrix}1/2\\1\end{pmatrix}", True),
        ("x = 10^{-9}", "x = 10^{-8}", False),
        ("x < 10^{-9}", "x < 10^{-8}", False),
        ("10^{-9} + 2i", "10^{-8} + 2i", False),
        ("10^{-9}, 2", "10^{-8}, 2", False),
        ("2i", "(1+i)^2", True),
        ("n=2, 3, 4", "n=1, 2, 3", False),
        (r"1-\frac1e", r"1+\frac1e", False),
    ],
    "irrational numbers": [
        (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt6}", True),
        (r"\sqrt2\sqrt3-\sqrt6", "0", True),
        (r"\sqrt2", "1.414", False),
        (r"\sqrt2", "1.414214", True),
        (r"10\sqrt2", "14.14", False),
        (r"\pi", "3.14", False),
        (r"\pi", r"\frac{355}{113}", False),
        (r"10^{-20}\sqrt2", "1.414214e-20", True),
        (r"10^{-20}\sqrt2", "1.5e-20", False),
        (r"\sin 30^\circ", r"\frac12", True),
    ],
    "too large to evaluate": [
        ("5", "9^{9^{9^9}}", False),
        ("5", "(10^6)!", False),
        ("2^{2^{100}}", "2^{2^{101}}", False),
        ("2^{2^{100}}", r"\left(2^{2^{100}}\right)", False),
        ("2^{2^{100}}", "$2^{2^{100}}$.", True),
        ("(10^6)!", "(10^6+1)!", False),
        ("(3, 5)", "(9^{9^{9^9}}, 5)", False),
        ("3", "1.5e999999999", False),
    ],
    "products and mixed numbers": [
        ("6", "2(3)", True),
        ("5", "2(3)", False),
        ("1", "2(1/2)", True),
        ("6", "(2)(3)", True),
        (r"\frac52", r"2\frac12", True),
        (r"\frac52", "2 1/2", True),
        (r"-\frac32", r"-1\frac12", True),
        (r"\frac32", "1\u00bd", True),
        ("8", "2**3", True),
    ],
    "ways to write a number": [
        (r"\frac13", r"0.\overline{3}", True),
        (r"\frac13", r"0.\dot{3}", True),
        (r"\frac13", "0.333...", True),
        (r"\frac13", "0.333333", False),
        (r"\frac16", r"0.1\overline{6}", True),
        (r"\frac17", r"0.\dot{1}4285\dot{7}", True),
        ("0.5", r"\frac12", True),
        (r"\frac12", r"\frac1{2}", True),
        (r"\frac12", r"\frac{1}2", True),
        (r"\frac12", "\u00bd", True),
        ("1000", "1,000", True),
        ("1000", "1{,}000", True),
        ("1000", r"1\,000", True),
        ("1000", "1\u202f000", True),
        ("1234", "1, 234", False),
        (r"1.5 \times 10^{-7}", "1.5\u00d710\u207b\u2077", True),
        (r"1.5 \times 10^{-7}", "1.5e-7", True),
        (r"1.5 \times 10^{-7}", r"1.5 \times 10^{-8}", False),
        ("5000", "5 x 10^3", True),
        ("x^2", "x\u00b2", True),
        (r"\sqrt{10}", "\u221a10", True),
    ],
    "percentages": [
        (r"50\%", "50", True),
        (r"50\%", "0.5", True),
        (r"50\%", r"\frac12", True),
        (r"50\%", "5", False),
        ("50", r"50\%", True),
        ("0.5", r"50\%", True),
        ("0.5", r"0.5\%", False),
        (r"0.5\%", "0.5", True),
        (r"\frac13", r"33.\overline{3}\%", True),
        (r"(50\%, 20\%)", "(0.5, 0.2)", True),
        (r"(50\%, 20\%)", "(0.5, 0.3)", False),
    ],
    "units that both have": [
        (r"18 \text{ in}^2", "18 square inches", True),
        (r"18 \text{ in}^2", r"18 \text{ ft}^2", False),
        (r"15\mbox{ cm}^2", "15 cm", False),
        (r"100 \text{ cm}", "1 m", False),
        (r"60 \text{ mph}", "60 miles per hour", True),
        (r"\$36", "36.00", True),
        (r"\$36", "36 dollars", True),
        (r"\$36", "36 cents", False),
        (r"90^\circ", r"90 \text{ radians}", False),
        (r"90^\circ", "90\u00b0F", True),
        (r"20^\circ\text{C}", "20\u00b0F", False),
        ("5", "5 below zero", False),
        (r"5 \text{ p.m.}", "5 a.m.", False),
        (r"15 \text{ students}", "15 people", True),
        (r"3 \text{ cm}, 4\text{ cm}", "3, 4", True),
        (r"(5\text{ cm}, 6)", "(5, 6)", True),
    ],
    "letters": [
        ("3t", "3", False),
        ("5m", "5", False),
        ("5m", "5 m", True),
        (r"5\text{ m}", "5 m", True),
        ("18000", "18k", True),
        ("18k", "18", False),
        ("3k+1", "1+3k", True),
        ("3k", "3000", False),
        ("2", "2x", False),
    ],
    "scales": [
        ("3000000", "$3 million", True),
        ("3", "$3 million", False),
        (r"\$3 million", "3000000", True),
        (r"5 \text{ million}", "5", False),
        ("2500000", r"\$2.5 \text{ million}", True),
        ("3500000", "$3.5M", True),
        ("36", "3 dozen", True),
    ],
}


_SENTENCES = [
    ("73", "489 + 416 = 905\n\nThus, the number is **73**.\n\n---\n\n\u2705 Final Answer: **73**", True),
    ("73", "234 + 1 = 235\n\n**Final Answer**\n\n$73$", True),
    ("234", "It is not 234.\n\nFinal Answer: **73**", False),
    (r"\pi", r"The answer is $\pi$.", True),
    (r"\text{east}", r"Therefore, the final answer is **\text{east}**.", True),
    ("2, 3", "The solutions are $x = 2$ and $x = 3$.", True),
]


def _pairs(table: str, *, right: bool) -> list[tuple[str, str, bool]]:
    return [
        ("5", answer.strip(), right) for line in table.split("\n") for answer in line.split(" | ") if answer.strip()
    ]


_KINDS |= {
    "sentences": _SENTENCES,
    "right for 5": _pairs(_FIVE, right=True),
    "wrong for 5": _pairs(_NOT_FIVE, right=False),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_answers_are_parsed_with_markup_and_units(maths: MathVerifier, kind: str) -> None:
    verdicts = {(gold, answer, right): maths.verify(gold, answer) for gold, answer, right in _KINDS[kind]}
    assert [pair for pair, verdict in verdicts.items() if verdict.right != pair[2]] == []
    assert {verdict.outcome for verdict in verdicts.values()} == {Outcome.GRADED}


def test_a_different_unit_is_reported(maths: MathVerifier) -> None:
    assert maths.verify(r"18 \text{ cm}", "18 m").detail == "the answer is in another unit"


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        # A unit's power does not count as an unevaluated expression.
        ("18", "18 in^2", True),
        ("3000000", r"\$3 million", True),
        (r"6\sqrt5", r"**\sqrt{180}**", False),
        ("52_8", "**52_9**", False),
    ],
)
def test_repeated_questions_are_recognized_despite_markup(
    maths: MathVerifier, gold: str, answer: str, right: bool
) -> None:
    question = r"What of 18 in^2, \$3 million, 52_9 and \sqrt{180} is meant?"
    assert judge_answer(maths, question=question, gold=gold, answer=answer).right == right


_PIECES = (*"*`_~^/$(){}.,=-1a \u00bd", "0.", "11", "**a", "1,000", r"\text{", r"\frac{", "cm ", "is ", "and ", r"\%")


def test_parsing_an_answer_takes_milliseconds() -> None:
    start = time.process_time()
    for piece in _PIECES:
        read_pair(f"0.{piece * 1000}"[:1000], f"3 {piece * 1000}"[:1000])
    assert time.process_time() - start < 0.1 * len(_PIECES)
