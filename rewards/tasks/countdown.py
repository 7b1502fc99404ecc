"""Countdown: join given numbers by + - * / to reach a target, using each number once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import compress
from math import comb
from random import Random
from typing import Literal, Self

from pydantic import Field, model_validator

from rewards.data.dataset import FileProblems, RuledSources, shuffled_prefix
from rewards.data.prompts import D1_FORMAT, PromptStyle, format_completion, user_turn
from rewards.data.rows import Row, preview
from rewards.data.sampling import rng_for, sample_distinct
from rewards.first_d1 import parsers as d1_parsers
from rewards.first_d1.python_arithmetic import evaluate_python_arithmetic
from rewards.parsing.answers import last_answer
from rewards.parsing.arithmetic import EvaluatedExpression, Operator
from rewards.parsing.equations import final_equation, read_statements
from rewards.parsing.expressions import (
    Expression,
    count_correct_steps,
    random_expression,
    steps_of,
    text_of,
    value_of,
)
from rewards.problem import Grade, Message, Problem, Split

_ALL_OPERATORS: tuple[Operator, ...] = ("+", "-", "*", "/")

# Most expressions are outside the range of targets. New numbers for each would favour small numbers and cost a hash.
_EXPRESSIONS_PER_DRAW = 8
_D1_TOLERANCE = 1e-5

# d1's wording (`diffu-grpo/data_utils.py`, `get_countdown_questions`), verbatim.
_D1_QUESTION = (
    "Using only the numbers {numbers}, create an arithmetic expression that evaluates to exactly {target}. "
    "You must use all numbers from the list, and each number must be used exactly once. "
    "You may use the operations +, -, *, and / as needed. "
    "After reasoning, provide only your final expression inside <answer></answer> tags "
    "without including an equals sign or the target number. "
    "For example, if the numbers are [2, 3, 4] and the target is 5, a valid answer is: <answer>\n2*4-3\n</answer>"
)


class CountdownConfig(RuledSources):
    """Settings of the Countdown problems. The defaults cover d1's evaluation set."""

    name: Literal["countdown"] = "countdown"
    """Selects this task."""
    num_numbers: int = Field(default=3, ge=2, le=6)
    """Numbers per problem."""
    min_number: int = Field(default=1, ge=1, le=1000)
    """Smallest given number."""
    max_number: int = Field(default=100, ge=1, le=1000)
    """Largest given number; at least `min_number`."""
    max_target: int = Field(default=100, ge=1, le=100_000)
    """Largest target; the smallest is 1."""
    operators: tuple[Operator, ...] = Field(default=_ALL_OPERATORS, min_length=1)
    """Operators that an expression may use, each listed once; others make it incorrect. The d1 prompt names all
    four."""
    prompt: PromptStyle = "d1"
    """`d1` for the wording of the d1 code, `compact` for `9 3 7 = 66`."""
    heldout_fraction: float = Field(default=0.1, ge=0.05, le=0.5)
    """Fraction of all multisets of numbers that is held out. All targets of one are in the same split."""
    shaping: float = Field(default=0.0, ge=0, le=1)
    """Weight of two more parts of the fixed reward, for policies that rarely reach the target: `numbers` for an
    expression of exactly the given numbers, and `close` for how near such an expression comes, shaping / (1 +
    distance)."""
    show_working: bool = False
    """Whether compact demonstrations show the steps first: `7*9=63;3+63=66<answer>3+7*9</answer>`. Those of prompt d1
    always do."""
    working: float = Field(default=0.0, ge=0, le=1)
    """Weight of one more part of the fixed reward: the fraction of the steps before the answer that are true and use
    numbers that are still available."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_number < self.min_number:
            raise ValueError(f"max_number is {self.max_number}; it must be at least min_number = {self.min_number}")
        if len(set(self.operators)) != len(self.operators):
            raise ValueError(f"operators is {list(self.operators)}; each operator must be listed once")
        for field in ("shaping", "working"):
            if (weight := getattr(self, field)) and self.reward == "d1":
                raise ValueError(f"{field} is {weight:g}, and reward d1 has no such parts; take reward fixed, or 0")
        if self.show_working and self.prompt == "d1":
            raise ValueError("show_working is true, and demonstrations of prompt d1 show it anyway; leave it out")
        if self.prompt == "d1" and len(self.operators) != len(_ALL_OPERATORS):
            raise ValueError(f"operators is {list(self.operators)}; prompt d1 names all four: use compact for fewer")
        return self


class Countdown:
    """Countdown: an expression that uses each given number once and equals the target."""

    name = "countdown"

    def __init__(self, config: CountdownConfig) -> None:
        self._config = config
        self._files = FileProblems(config, self._problem_of_row, lambda problem: problem.problem_id.partition("=")[0])

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """Return `count` problems of a split, unique by numbers and target, determined by (split, count, seed).

        Every target is the value of a random expression, so it can be reached; its divisions leave no remainder.
        Problems with equal ids from different seeds have equal prompts, but may demonstrate different solutions.
        Problems from a file are used as they are, and the generated split next to it excludes their multisets of
        numbers. Raises ValueError if the split has too few problems or its file cannot be used.
        """
        if (found := self._files.of(split)) is not None:
            return shuffled_prefix(found, task=self.name, split=split, count=count, seed=seed)
        return sample_distinct(lambda rng: self._draw(rng, split), task=self.name, split=split, count=count, seed=seed)

    def size(self, split: Split) -> int | None:
        """Return the number of problems in the split's file; None if they are generated."""
        found = self._files.of(split)
        return None if found is None else len(found)

    def max_size(self, split: Split) -> int:
        """Return the size of the file; else the number of multisets times targets, most of which cannot be reached."""
        if (found := self._files.of(split)) is not None:
            return len(found)
        num_choices = self._config.max_number - self._config.min_number + 1
        return comb(num_choices + self._config.num_numbers - 1, self._config.num_numbers) * self._config.max_target

    def warnings(self) -> list[str]:
        """Return sentences on what was left out of the files read so far."""
        return self._files.warnings

    def example(self) -> Problem:
        """Return the first training problem of seed 0."""
        return self.problems(Split.TRAIN, 1, seed=0)[0]

    def grade(self, problem: Problem, text: str) -> Grade:
        """Give 0 without an answer, 0.1 with one, 1 with a correct one: d1's `countdown_reward_func`. Never raises.

        Parts: `answer` (0 or 0.1) for an answer, `correct` (0 or 0.9) for a correct one, and more with `shaping` and
        `working`. By the fixed rules a correct answer is an expression that uses exactly the given numbers, only the
        config's operators, and equals the target exactly. d1's `eval` accepted what this rejects: `**`, `//`, decimals,
        signs (`-3+7`), line breaks.
        """
        answer = final_equation(text)
        uses, misses_by = self._check_expression(problem, answer)
        is_solved = uses and misses_by == 0
        is_answered, is_rewarded = answer is not None, is_solved
        if self._config.reward == "d1":
            rewarded = last_answer(text)
            is_answered = rewarded is not None
            is_rewarded = rewarded is not None and _comes_to_target(problem, rewarded)
        if self._config.protocol == "d1":
            answer = d1_parsers.countdown_expression(text)
            is_solved = _comes_to_target(problem, answer.strip())
        parts = {"answer": 0.1 if is_answered else 0.0, "correct": 0.9 if is_rewarded else 0.0}
        if self._config.shaping:
            parts["numbers"] = self._config.shaping if uses else 0.0
            parts["close"] = float(self._config.shaping / (1 + misses_by)) if uses else 0.0
        if self._config.working:
            numbers = _numbers_of(problem)
            # A problem from a file may have only one number, and then there is no step.
            num_steps = max(1, len(numbers) - 1)
            parts["working"] = self._config.working * count_correct_steps(_working_of(text), numbers) / num_steps
        return Grade(reward=sum(parts.values()), parts=parts, correct=is_solved, answer=answer)

    def from_ground_truth(self, question: str, truth: object) -> Problem:
        """Return the problem of a truth `[[numbers], target]`, as published by d1, or an object of both, as by
        TinyZero.

        Raises ValueError for any other truth.
        """
        match truth:
            case {"numbers": numbers, "target": target} | {"nums": numbers, "target": target}:
                return self.from_ground_truth(question, [numbers, target])
            case [list() as numbers, int() as target] if numbers and all(type(number) is int for number in numbers):
                return self._given(user_turn(question), numbers, target)
        raise ValueError(f"the ground truth is {preview(truth)}; a countdown line has [[numbers], target]")

    def _problem_of_row(self, row: Row) -> Problem:
        """Return the problem of a row with `nums` and `target` (Jiayi-Pan/Countdown-Tasks-3to4), or d1's `input` and
        `output`."""
        if "input" in row.fields:
            numbers, target = _integers(row, "input"), _integers(row, "output")[:1]
        else:
            numbers, target = _integers(row, "nums"), _integers(row, "target")[:1]
        return self._given(self._messages(numbers, target[0]), numbers, target[0])

    def _given(self, messages: tuple[Message, ...], numbers: Sequence[int], target: int) -> Problem:
        """Return a problem without a known solution."""
        return Problem(
            problem_id=f"{self._key(numbers)}={target}",
            messages=messages,
            answer=str(target),
            reference_completion="",
            metadata={"numbers": " ".join(map(str, numbers))},
        )

    def _key(self, numbers: Sequence[int]) -> str:
        return f"{self.name}/{','.join(map(str, sorted(numbers)))}"

    def _messages(self, numbers: Sequence[int], target: int) -> tuple[Message, ...]:
        if self._config.prompt == "compact":
            return user_turn(f"{' '.join(map(str, numbers))} = {target}")
        return user_turn(f"{D1_FORMAT}\n{_D1_QUESTION.format(numbers=list(numbers), target=target)}")

    def _check_expression(self, problem: Problem, answer: str | None) -> tuple[bool, Fraction]:
        """Return whether an answer uses the given numbers by the fixed rules, and its distance from the target.

        The last statement has to use them. All statements that do are considered, with all sides of an equation, and
        the value farthest from the target counts: two expressions, one of which is wrong, are a wrong answer.
        """
        numbers, target = _numbers_of(problem), int(problem.answer)

        def uses(side: EvaluatedExpression) -> bool:
            return sorted(side.numbers) == numbers and side.operators.issubset(self._config.operators)

        statements = read_statements(answer or "")
        using = [any(map(uses, sides)) for sides in statements]
        if not using or not using[-1]:
            return False, Fraction(0)
        values = [side.value for sides in compress(statements, using) for side in sides]
        return True, max(abs(value - target) for value in values)

    def _draw(self, rng: Random, split: Split) -> Problem | None:
        """Return a random problem of `split`; None if the sample is in another split or has no fitting target."""
        config = self._config
        numbers = sorted(rng.randint(config.min_number, config.max_number) for _ in range(config.num_numbers))
        key = self._key(numbers)
        if not self._files.belongs_to(split, key, config.heldout_fraction):
            return None
        for _ in range(_EXPRESSIONS_PER_DRAW):
            expression = random_expression(rng, numbers, config.operators)
            if expression is not None and 0 < value_of(expression) <= config.max_target:
                return self._make_problem(f"{key}={value_of(expression)}", numbers, expression)
        return None

    def _make_problem(self, problem_id: str, numbers: list[int], solution: Expression) -> Problem:
        # The order shown is part of the prompt, so it depends on the problem alone and not on the seed.
        target, asked = value_of(solution), list(numbers)
        rng_for(problem_id).shuffle(asked)
        steps = steps_of(solution)
        label = format_completion(self._config.prompt, reasoning="\n".join(steps), answer=text_of(solution))
        if self._config.show_working:
            label = ";".join(steps).replace(" ", "") + label
        return replace(self._given(self._messages(asked, target), asked, target), reference_completion=label)


def _numbers_of(problem: Problem) -> list[int]:
    """Return the numbers of a problem in ascending order."""
    return sorted(int(number) for number in problem.metadata["numbers"].split())


def _working_of(text: str) -> str:
    """Return the text before the last answer, without reasoning tags."""
    before, _, _ = text.rpartition("<answer>")
    return before.replace("<reasoning>", "").replace("</reasoning>", "").strip()


def _comes_to_target(problem: Problem, expression: str) -> bool:
    """Return whether d1 accepts an expression: its digit runs are the given numbers, and its Python value is close
    enough."""
    try:
        numbers = sorted(int(number) for number in re.findall(r"\d+", expression))
    except ValueError:
        # Python refuses to convert thousands of digits.
        return False
    value = evaluate_python_arithmetic(expression) if numbers == _numbers_of(problem) else None
    return value is not None and abs(value - int(problem.answer)) < _D1_TOLERANCE


def _integers(row: Row, column: str) -> list[int]:
    """Return a list of integers, or of a comma-separated text, as in d1's files. Raises ValueError with the place."""
    value = row.value(column)
    numbers = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    try:
        whole = [int(number) for number in numbers]
    except (OverflowError, TypeError, ValueError):
        whole = []
    if not whole or any(isinstance(number, float) and not number.is_integer() for number in numbers):
        raise ValueError(f"{row.place}: {column} is {preview(value)}; it should be whole numbers")
    return whole
