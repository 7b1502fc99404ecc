"""Correctness of a math answer: equivalence to the gold answer, plus checks that equivalence misses."""

from __future__ import annotations

import re

from rewards.first_d1.maths import equivalent
from rewards.maths.answer_parser import read_pair
from rewards.maths.markup import unwrapped
from rewards.maths.spelling import normalized_latex
from rewards.maths.verifier import AnswerVerdict, MathVerifier
from rewards.parsing.answers import final_answer
from rewards.parsing.quantities import final_quantity, read_quantity

_NUMBER_BASE = re.compile(r"[0-9]_\{?([0-9]+)\}?$")
_LABEL = re.compile(
    r"(?P<date>[0-9]{4}-[0-9]{1,2}-[0-9]{1,2})|(?P<slashes>[0-9]+(?:/[0-9]+){2,})|(?P<ratio>[0-9]+(?::[0-9]+){2,})"
    r"|(?P<time>[0-9]{1,2}:[0-5][0-9])|(?P<range>[0-9]+-[0-9]+)"
)
# The other kinds may be a quotient or a difference.
_NO_NUMBER = ("date", "slashes", "ratio")
_SEVERAL_TERMS = re.compile(r"[-+,=<>]|\\(?:pm|mp|[lg]e|text)")
_NAME = re.compile(r"(?:\\[a-z]+\s+)?([A-Za-z]{2,})")
# `abc` may be a product. Longer words, and words that repeat a letter, are not.
_LONGEST_PRODUCT = 4
# The segment `AB` is `BA`, but the angle `ABC` is not `ACB`.
_SEGMENT = 2
_ROMAN = frozenset("IVXLCDM")
# Unfinished work: a sign between terms, a power, a factorial, or a command that is neither layout nor a name.
_OPERATION = re.compile(
    r"[+*^!]|(?<=[\w)}])-|\\(?!(?:frac|dfrac|text|mbox|mathrm|pi|infty|circ|begin|end|left|right)(?![a-zA-Z]))[a-zA-Z]+"
)


def final_term(text: str) -> str | None:
    r"""Return the same as `final_answer`, with a sign before a box and a scale after it if they are clear:
    `-\boxed{5}`."""
    answer, quantity = final_answer(text), final_quantity(text)
    if answer is None or quantity is None or _SEVERAL_TERMS.search(answer):
        return answer
    return quantity if quantity.endswith(answer) or read_quantity(quantity) is not None else answer


def judge_answer(verifier: MathVerifier, *, question: str, gold: str, answer: str) -> AnswerVerdict:
    """Judge whether an answer is correct: equivalent to the gold answer, and not just a repetition of the question.

    Also rejects another number base, a set instead of an ordered list, and labels that differ. Never raises.
    """
    right, given = read_pair(gold, answer)
    if _bases(right.expression, given.expression) > 1:
        return AnswerVerdict(detail="the number is in another base")
    if {right.container, given.container} == {"(", "{"}:
        return AnswerVerdict(detail="one is a set and the other has an order")
    if _are_different_labels(right.symbolic, given.symbolic):
        return AnswerVerdict(detail="the times, dates, ratios or names differ")
    verdict = verifier.verify(gold, answer)
    if verdict.right and not equivalent(gold, answer) and _repeats(question, answer, given.expression):
        return AnswerVerdict(detail="the answer repeats the question")
    return verdict


def _bases(gold: str, answer: str) -> int:
    """Count the different bases that two numbers state: Math-Verify ignores them."""
    found = (_NUMBER_BASE.search(normalized_latex(text)) for text in (gold, answer))
    return len({base.group(1) for base in found if base})


def _are_different_labels(gold: str, answer: str) -> bool:
    """Return whether they are different times, dates, ranges or ratios, or words with the same letters in another
    order.

    Math-Verify reads `3:45` as a quotient, as it does `1:15`, `10-12` as a difference and `listen` as a product.
    """
    one, other = (_LABEL.fullmatch(text.replace(" ", "")) for text in (gold, answer))
    if one and other:
        return one.lastgroup == other.lastgroup and _parts(one[0]) != _parts(other[0])
    if found := one or other:
        return found.lastgroup in _NO_NUMBER
    words = [_NAME.fullmatch(text) for text in (gold, answer)]
    if not all(words):
        return False
    name, said = (word[1] for word in words if word)
    is_label = name.isupper() and (len(name) > _SEGMENT or _ROMAN.issuperset(name))
    is_word = is_label or len(name) > _LONGEST_PRODUCT or len(name) > len(set(name))
    return is_word and name != said and sorted(name) == sorted(said)


def _parts(label: str) -> list[int]:
    return [int(part) for part in re.findall("[0-9]+", label)]


def _repeats(question: str, answer: str, expression: str) -> bool:
    r"""Return whether an answer repeats the question with the work still to do: `\\sqrt{180}`, to be simplified."""
    asked, said = (normalized_latex(text).replace(" ", "") for text in (question, unwrapped(answer)))
    return said in asked and _OPERATION.search(expression) is not None
