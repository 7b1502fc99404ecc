"""Countdown: join given numbers by + - * / so that they come to a target, each number used once."""

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

from rewards.data.dataset import FileProblems, Files, chosen
from rewards.data.draw import draw_distinct, rng_for
from rewards.data.prompts import D1_FORMAT, PromptStyle, demonstration, user_turn
from rewards.data.rows import Row, shown
from rewards.first_d1 import parsers as d1_parsers
from rewards.first_d1.python_arithmetic import python_value
from rewards.problem import Grade, Message, Problem, Rules, Split
from rewards.reading.answers import last_answer
from rewards.reading.arithmetic import EvaluatedExpression, Operator
from rewards.reading.equations import final_equation, read_statements
from rewards.reading.expressions import (
    Expression,
    num_right_steps,
    random_expression,
    steps_of,
    text_of,
    value_of,
)

_ALL_OPERATORS: tuple[Operator, ...] = ("+", "-", "*", "/")

# Most expressions miss the range of targets. Drawing new numbers for each would favour small numbers and cost a hash.
_EXPRESSIONS_PER_DRAW = 8
_D1_TOLERANCE = 1e-5

# d1's wording (`diffu-grpo/data_utils.py`, `get_countdown_questions`), to the letter.
_D1_QUESTION = (
    "Using only the numbers {numbers}, create an arithmetic expression that evaluates to exactly {target}. "
    "You must use all numbers from the list, and each number must be used exactly once. "
    "You may use the operations +, -, *, and / as needed. "
    "After reasoning, provide only your final expression inside <answer></answer> tags "
    "without including an equals sign or the target number. "
    "For example, if the numbers are [2, 3, 4] and the target is 5, a valid answer is: <answer>\n2*4-3\n</answer>"
)


class CountdownConfig(Files):
    """Which Countdown problems are posed, and how. The defaults cover d1's evaluation set."""

    name: Literal["countdown"] = "countdown"
    """Selects this task."""
    num_numbers: int = Field(default=3, ge=2, le=6)
    """How many numbers a problem gives."""
    min_number: int = Field(default=1, ge=1, le=1000)
    """The smallest number that can be given."""
    max_number: int = Field(default=100, ge=1, le=1000)
    """The largest number that can be given; at least `min_number`."""
    max_target: int = Field(default=100, ge=1, le=100_000)
    """The largest target; the smallest is 1."""
    operators: tuple[Operator, ...] = Field(default=_ALL_OPERATORS, min_length=1)
    """The operators that an expression may use, each listed once; others are illegal. The d1 prompt names all four."""
    prompt: PromptStyle = "d1"
    """`d1` for the words of the d1 code, `compact` for `9 3 7 = 66`."""
    heldout_fraction: float = Field(default=0.1, ge=0.05, le=0.5)
    """Fraction of all sets of numbers that is held out. All targets of one set are in the same split."""
    reward: Rules = "fixed"
    """The reward that is trained on."""
    protocol: Rules = "fixed"
    """What counts as correct in evaluation."""
    shaping: float = Field(default=0.0, ge=0, le=1)
    """Weight of two more parts of the fixed reward, for policies that hardly ever come to the target: `numbers` for an
    expression of exactly the given numbers, and `close` for one that also comes near, shaping / (1 + the distance)."""
    show_working: bool = False
    """Whether compact demonstrations work the answer out first: `7*9=63;3+63=66<answer>3+7*9</answer>`. Those of prompt
    d1 always do."""
    working: float = Field(default=0.0, ge=0, le=1)
    """Weight of one more part of the fixed reward: the share of the steps before the answer that are true and use the
    numbers that are left."""

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
    """Given numbers, each used once, joined by + - * / to come to a target."""

    name = "countdown"

    def __init__(self, config: CountdownConfig) -> None:
        self._config = config
        self._files = FileProblems(config, self._pose_row, lambda problem: problem.problem_id.partition("=")[0])

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` problems of a split, unique by numbers and target, determined by (split, count, seed).

        Every target is the value of a random expression, so it can be reached; divisions on the way leave no remainder.
        Problems with equal ids from different seeds have equal prompts, but may demonstrate different solutions.
        Those of a file are taken as they are, and a split that is made beside it has none of its sets of numbers.
        Raises ValueError when the split has fewer, or its file cannot be used.
        """
        if (found := self._files.of(split)) is not None:
            return chosen(found, task=self.name, split=split, count=count, seed=seed)
        return draw_distinct(lambda rng: self._draw(rng, split), task=self.name, split=split, count=count, seed=seed)

    def size(self, split: Split) -> int | None:
        """How many a file has; None where they are generated."""
        found = self._files.of(split)
        return None if found is None else len(found)

    def at_most(self, split: Split) -> int:
        """As many as a file has; else every set of numbers with every target, most of which it does not come to."""
        if (found := self._files.of(split)) is not None:
            return len(found)
        num_choices = self._config.max_number - self._config.min_number + 1
        return comb(num_choices + self._config.num_numbers - 1, self._config.num_numbers) * self._config.max_target

    def remarks(self) -> list[str]:
        """What was left out of the files that have been read, in sentences."""
        return self._files.remarks

    def example(self) -> Problem:
        """The first training problem of seed 0."""
        return self.problems(Split.TRAIN, 1, seed=0)[0]

    def grade(self, problem: Problem, text: str) -> Grade:
        """0 without an answer, 0.1 with one, 1 with a right one: d1's `countdown_reward_func`. Never raises.

        Parts: `answer` (0 or 0.1) for an answer, `correct` (0 or 0.9) for a right one, and more with `shaping` and
        `working`. By the fixed rules a right one is an expression that uses exactly the given numbers, only the
        config's operators, and comes exactly to the target. What d1's `eval` took and this refuses: `**`, `//`,
        decimals, signs (`-3+7`), line breaks.
        """
        answer = final_equation(text)
        uses, misses_by = self._looked_at(problem, answer)
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
            # A problem of a file may have one number, and then there is no step.
            num_steps = max(1, len(numbers) - 1)
            parts["working"] = self._config.working * num_right_steps(_working_of(text), numbers) / num_steps
        return Grade(reward=sum(parts.values()), parts=parts, correct=is_solved, answer=answer)

    def posed(self, question: str, truth: object) -> Problem:
        """The problem whose truth is `[[numbers], target]`, as d1 publishes it, or an object of both, as TinyZero's.

        Raises ValueError.
        """
        match truth:
            case {"numbers": numbers, "target": target} | {"nums": numbers, "target": target}:
                return self.posed(question, [numbers, target])
            case [list() as numbers, int() as target] if numbers and all(type(number) is int for number in numbers):
                return self._given(user_turn(question), numbers, target)
        raise ValueError(f"the ground truth is {shown(truth)}; a countdown line has [[numbers], target]")

    def _pose_row(self, row: Row) -> Problem:
        """Of `nums` and `target` (the hub's Jiayi-Pan/Countdown-Tasks-3to4), or d1's `input` and `output`."""
        if "input" in row.fields:
            numbers, target = _integers(row, "input"), _integers(row, "output")[:1]
        else:
            numbers, target = _integers(row, "nums"), _integers(row, "target")[:1]
        return self._given(self._asked(numbers, target[0]), numbers, target[0])

    def _given(self, messages: tuple[Message, ...], numbers: Sequence[int], target: int) -> Problem:
        """A problem of which no solution is known."""
        return Problem(
            problem_id=f"{self._key(numbers)}={target}",
            messages=messages,
            answer=str(target),
            demonstration="",
            metadata={"numbers": " ".join(map(str, numbers))},
        )

    def _key(self, numbers: Sequence[int]) -> str:
        return f"{self.name}/{','.join(map(str, sorted(numbers)))}"

    def _asked(self, numbers: Sequence[int], target: int) -> tuple[Message, ...]:
        if self._config.prompt == "compact":
            return user_turn(f"{' '.join(map(str, numbers))} = {target}")
        return user_turn(f"{D1_FORMAT}\n{_D1_QUESTION.format(numbers=list(numbers), target=target)}")

    def _looked_at(self, problem: Problem, answer: str | None) -> tuple[bool, Fraction]:
        """Whether an answer uses the given numbers by the fixed rules, and how far from the target it then comes.

        Its last statement has to use them. Every statement that does counts, with all sides of an equation, and of
        those the value farthest from the target: two expressions, of which one is wrong, are a wrong answer.
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
        """A random problem of `split`, or None when the draw is of another split or has no fitting target."""
        config = self._config
        numbers = sorted(rng.randint(config.min_number, config.max_number) for _ in range(config.num_numbers))
        key = self._key(numbers)
        if not self._files.is_made_for(split, key, config.heldout_fraction):
            return None
        for _ in range(_EXPRESSIONS_PER_DRAW):
            expression = random_expression(rng, numbers, config.operators)
            if expression is not None and 0 < value_of(expression) <= config.max_target:
                return self._pose(f"{key}={value_of(expression)}", numbers, expression)
        return None

    def _pose(self, problem_id: str, numbers: list[int], solution: Expression) -> Problem:
        # The order shown is part of the prompt, so it hangs on the problem alone and not on the seed that found it.
        target, asked = value_of(solution), list(numbers)
        rng_for(problem_id).shuffle(asked)
        steps = steps_of(solution)
        label = demonstration(self._config.prompt, reasoning="\n".join(steps), answer=text_of(solution))
        if self._config.show_working:
            label = ";".join(steps).replace(" ", "") + label
        return replace(self._given(self._asked(asked, target), asked, target), demonstration=label)


def _numbers_of(problem: Problem) -> list[int]:
    """The numbers of a problem, ascending."""
    return sorted(int(number) for number in problem.metadata["numbers"].split())


def _working_of(text: str) -> str:
    """What stands before the last answer, without the tags around it."""
    before, _, _ = text.rpartition("<answer>")
    return before.replace("<reasoning>", "").replace("</reasoning>", "").strip()


def _comes_to_target(problem: Problem, expression: str) -> bool:
    """Whether d1 takes an expression: its runs of digits are the numbers, and Python's value of it is close enough."""
    try:
        numbers = sorted(int(number) for number in re.findall(r"\d+", expression))
    except ValueError:
        # Thousands of digits.
        return False
    value = python_value(expression) if numbers == _numbers_of(problem) else None
    return value is not None and abs(value - int(problem.answer)) < _D1_TOLERANCE


def _integers(row: Row, column: str) -> list[int]:
    """A list of whole numbers, or a text with commas between them, as d1 has it. Raises ValueError with the place."""
    value = row.value(column)
    numbers = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    try:
        whole = [int(number) for number in numbers]
    except (OverflowError, TypeError, ValueError):
        whole = []
    if not whole or any(isinstance(number, float) and not number.is_integer() for number in numbers):
        raise ValueError(f"{row.place}: {column} is {shown(value)}; it should be whole numbers")
    return whole
