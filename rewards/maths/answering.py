"""Whether an answer answers a question: what an expression that means the same may not do."""

from __future__ import annotations

import re

from rewards.first_d1.maths import equivalent
from rewards.maths.markup import unwrapped
from rewards.maths.spelling import respelled
from rewards.maths.verifier import MathVerifier, Verdict
from rewards.maths.written import read_pair
from rewards.reading.answers import final_answer
from rewards.reading.quantities import final_quantity, read_quantity

_NUMBER_BASE = re.compile(r"[0-9]_\{?([0-9]+)\}?$")
_LABEL = re.compile(
    r"(?P<date>[0-9]{4}-[0-9]{1,2}-[0-9]{1,2})|(?P<slashes>[0-9]+(?:/[0-9]+){2,})|(?P<ratio>[0-9]+(?::[0-9]+){2,})"
    r"|(?P<time>[0-9]{1,2}:[0-5][0-9])|(?P<range>[0-9]+-[0-9]+)"
)
# The others may be a quotient and a difference.
_NO_NUMBER = ("date", "slashes", "ratio")
_SEVERAL_TERMS = re.compile(r"[-+,=<>]|\\(?:pm|mp|[lg]e|text)")
_NAME = re.compile(r"(?:\\[a-z]+\s+)?([A-Za-z]{2,})")
# `abc` may be a product; longer words and words with a letter twice are none.
_LONGEST_PRODUCT = 4
# `AB` is `BA`, and `ABC` is no `ACB`.
_SEGMENT = 2
_ROMAN = frozenset("IVXLCDM")
# Something is left to do: a sign between terms, a power, a factorial, or a command that is neither layout nor a name.
_OPERATION = re.compile(
    r"[+*^!]|(?<=[\w)}])-|\\(?!(?:frac|dfrac|text|mbox|mathrm|pi|infty|circ|begin|end|left|right)(?![a-zA-Z]))[a-zA-Z]+"
)


def final_term(text: str) -> str | None:
    r"""As `final_answer`, with a sign before a box and a scale behind it, where that is clear: `-\boxed{5}`."""
    answer, quantity = final_answer(text), final_quantity(text)
    if answer is None or quantity is None or _SEVERAL_TERMS.search(answer):
        return answer
    return quantity if quantity.endswith(answer) or read_quantity(quantity) is not None else answer


def answers(verifier: MathVerifier, *, question: str, gold: str, answer: str) -> Verdict:
    """Whether an answer means what the gold answer means, in the same base, and does not repeat the question. Never
    raises."""
    right, given = read_pair(gold, answer)
    if _bases(right.expression, given.expression) > 1:
        return Verdict(detail="the number is in another base")
    if {right.container, given.container} == {"(", "{"}:
        return Verdict(detail="one is a set and the other has an order")
    if _are_different_labels(right.symbolic, given.symbolic):
        return Verdict(detail="the times, dates, ratios or names differ")
    verdict = verifier.verify(gold, answer)
    if verdict.right and not equivalent(gold, answer) and _repeats(question, answer, given.expression):
        return Verdict(detail="the answer repeats the question")
    return verdict


def _bases(gold: str, answer: str) -> int:
    """How many different bases two numbers say they are written in: Math-Verify reads over them."""
    found = (_NUMBER_BASE.search(respelled(text)) for text in (gold, answer))
    return len({base.group(1) for base in found if base})


def _are_different_labels(gold: str, answer: str) -> bool:
    """Whether they are other times, dates, ranges or ratios, or have the letters of a word in another order.

    To Math-Verify `3:45` is a quotient, as `1:15` is, `10-12` a difference and `listen` a product.
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
    """Whether an answer says what the question says, with the work still to do: `\\sqrt{180}`, to be simplified."""
    asked, said = (respelled(text).replace(" ", "") for text in (question, unwrapped(answer)))
    return said in asked and _OPERATION.search(expression) is not None
