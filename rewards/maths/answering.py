"""Whether an answer answers a question: what an expression that means the same may not do."""

from __future__ import annotations

import re

from rewards.first_d1.maths import equivalent
from rewards.maths.markup import unwrapped
from rewards.maths.spelling import respelled
from rewards.maths.verifier import MathVerifier, Verdict
from rewards.maths.written import read_pair

_NUMBER_BASE = re.compile(r"[0-9]_\{?([0-9]+)\}?$")
# Something is left to do: a sign between terms, a power, a factorial, or a command that is neither layout nor a name.
_OPERATION = re.compile(
    r"[+*^!]|(?<=[\w)}])-|\\(?!(?:frac|dfrac|text|mbox|mathrm|pi|infty|circ|begin|end|left|right)(?![a-zA-Z]))[a-zA-Z]+"
)


def answers(verifier: MathVerifier, *, question: str, gold: str, answer: str) -> Verdict:
    """Whether an answer means what the gold answer means, in the same base, and does not repeat the question. Never
    raises."""
    right, given = read_pair(gold, answer)
    if _bases(right.expression, given.expression) > 1:
        return Verdict(detail="the number is in another base")
    verdict = verifier.verify(gold, answer)
    if verdict.right and not equivalent(gold, answer) and _repeats(question, answer, given.expression):
        return Verdict(detail="the answer repeats the question")
    return verdict


def _bases(gold: str, answer: str) -> int:
    """How many different bases two numbers say they are written in: Math-Verify reads over them."""
    found = (_NUMBER_BASE.search(respelled(text)) for text in (gold, answer))
    return len({base.group(1) for base in found if base})


def _repeats(question: str, answer: str, expression: str) -> bool:
    """Whether an answer says what the question says, with the work still to do: `\\sqrt{180}`, to be simplified."""
    asked, said = (respelled(text).replace(" ", "") for text in (question, unwrapped(answer)))
    return said in asked and _OPERATION.search(expression) is not None
