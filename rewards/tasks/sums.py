"""Sums: running sums of a few digits, a toy task that a tiny model learns in minutes."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations_with_replacement, product
from typing import Literal

from pydantic import Field

from rewards.data.prompts import format_completion, user_turn
from rewards.data.rows import preview
from rewards.data.sampling import TooFewProblemsError, rng_for
from rewards.data.split import SplitConfig, split_of
from rewards.parsing.answers import ascii_digits, last_answer
from rewards.problem import Grade, Problem, Split


class SumsConfig(SplitConfig):
    """Settings of the sums. All orders of the same operands are in the same split."""

    name: Literal["sums"] = "sums"
    """Selects this task."""
    num_terms: int = Field(default=3, ge=2, le=5)
    """Number of digits 0-9 in a problem; all splits together have 10 ** num_terms problems."""
    modulus: int = Field(default=10, ge=2, le=10)
    """Modulus of the running sums: an answer has one digit per term, each less than this."""
    heldout_fraction: float = Field(default=0.2, ge=0.05, le=0.5)
    """Fraction of all multisets of operands that is held out. All orders of one are in the same split."""


class Sums:
    """Running sums of digits, a toy task for tests and demonstrations.

    The answer to `3 7 9` is `309`: 3, 3 + 7 and 3 + 7 + 9 modulo 10.
    """

    name = "sums"

    def __init__(self, config: SumsConfig) -> None:
        self._config = config

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """Return `count` distinct problems of a split, determined by (split, count, seed).

        Raises ValueError if the split has fewer; with three terms all splits together have 1,000.
        """
        operands = self._operands(split)
        if count > len(operands):
            raise TooFewProblemsError(task=self.name, split=split, available=len(operands), count=count)
        rng_for(f"{self.name}/{split}/{seed}").shuffle(operands)
        return [self._make_problem(terms) for terms in operands[:count]]

    def size(self, split: Split) -> int:
        """Return the number of problems of a split."""
        return len(self._operands(split))

    def max_size(self, split: Split) -> int:
        """Return the exact size."""
        return self.size(split)

    def warnings(self) -> list[str]:
        """Return no warnings: all problems are generated."""
        return []

    def example(self) -> Problem:
        """Return the first training problem of seed 0."""
        return self.problems(Split.TRAIN, 1, seed=0)[0]

    def grade(self, problem: Problem, text: str) -> Grade:
        """Give the fraction of the answer's digits that are right, position by position.

        The digits are those of the last `<answer>`. Missing ones are wrong. Surplus ones are ignored by the reward, but
        `correct` requires exactly the right digits. One part: `digits`. Never raises for any text.
        """
        digits = ascii_digits(last_answer(text) or "")
        num_right = sum(given == right for given, right in zip(digits, problem.answer, strict=False))
        reward = num_right / len(problem.answer)
        return Grade(reward=reward, parts={"digits": reward}, correct=digits == problem.answer)

    def from_ground_truth(self, question: str, truth: object) -> Problem:
        """Return the problem whose question is its digits, `3 7 9`, and whose truth is its answer. Raises
        ValueError."""
        terms = question.split()
        if (
            not isinstance(truth, str)
            or len(terms) != len(truth)
            or not all(t.isascii() and t.isdigit() for t in terms)
        ):
            raise ValueError(f"the ground truth {preview(truth)} does not fit the question {preview(question)}")
        return replace(self._make_problem(tuple(map(int, terms))), answer=truth)

    def _operands(self, split: Split) -> list[tuple[int, ...]]:
        """Return the operands of every problem of a split in ascending order."""
        num_terms = self._config.num_terms
        fractions = self._config.heldout_fraction, self._config.validation_fraction
        multisets = combinations_with_replacement(range(10), num_terms)
        ours = {terms for terms in multisets if split_of(f"{self.name}/{_joined(terms, ',')}", *fractions) is split}
        return [terms for terms in product(range(10), repeat=num_terms) if tuple(sorted(terms)) in ours]

    def _make_problem(self, terms: tuple[int, ...]) -> Problem:
        answer = "".join(str(total % self._config.modulus) for total in accumulate(terms))
        return Problem(
            problem_id=f"{self.name}/{_joined(terms, ',')}",
            messages=user_turn(_joined(terms, " ")),
            answer=answer,
            reference_completion=format_completion("compact", reasoning="", answer=answer),
        )


def _joined(terms: tuple[int, ...], separator: str) -> str:
    return separator.join(map(str, terms))
