"""GSM8K: grade-school word problems whose answer is a number (arXiv 2110.14168)."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

from rewards.data.dataset import DataConfig, DataTask, problem_id
from rewards.data.prompts import D1_FORMAT, PromptStyle, format_completion, user_turn
from rewards.data.rows import Row, preview
from rewards.data.sources import HubSplit
from rewards.first_d1.maths import gsm8k_number, gsm8k_truth
from rewards.first_d1.training_rewards import gsm8k_parts
from rewards.parsing.answers import last_answer
from rewards.parsing.quantities import NO_NUMBER_FOUND, final_quantity, read_quantity
from rewards.problem import Grade, Problem, Split

_HUB = {
    Split.TRAIN: HubSplit(repo="openai/gsm8k", config="main", split="train", num_rows=7473),
    Split.HELDOUT: HubSplit(repo="openai/gsm8k", config="main", split="test", num_rows=1319),
}
_EXAMPLE = {
    "question": "Ann has 3 boxes of 4 pens each, and loses 2 pens. How many pens has she left?",
    "answer": "The boxes hold 3 * 4 = 12 pens.\n12 - 2 = 10 are left.\n#### 10",
}
_MARK = "####"
_TOO_LARGE = 1e100
_CALCULATION = re.compile(r"<<[^<>]*>>")


class Gsm8kConfig(DataConfig):
    """Source and prompt of the GSM8K problems: `openai/gsm8k`, or files with its columns `question` and `answer`."""

    name: Literal["gsm8k"] = "gsm8k"
    """Selects this task."""
    prompt: PromptStyle = "d1"
    """`d1` for the wording of the d1 code, `compact` for the question alone."""


class Gsm8k(DataTask):
    """GSM8K: grade-school word problems."""

    name = "gsm8k"
    hub = _HUB
    example_row = _EXAMPLE

    def __init__(self, config: Gsm8kConfig) -> None:
        super().__init__(config)
        self._config = config

    def grade(self, problem: Problem, text: str) -> Grade:
        """Grade whether the number in the final answer equals the reference exactly. Never raises.

        Fixed parts: `answer` (0 or 0.1) for a closed answer tag, `correct` (0 or 0.9). d1's are those of `gsm8k_parts`.
        """
        answer = final_quantity(text)
        read = None if answer is None else read_quantity(answer)
        is_right = read is not None and str(read) == problem.answer
        detail = NO_NUMBER_FOUND if answer is not None and read is None else ""
        if self._config.reward == "d1":
            parts = gsm8k_parts(text, problem.metadata["written"])
        else:
            is_tagged = last_answer(text) is not None
            parts = {"answer": 0.1 if is_tagged else 0.0, "correct": 0.9 if is_right else 0.0}
        if self._config.protocol == "d1":
            number = gsm8k_number(text)
            is_right = number is not None and repr(number) == problem.metadata["d1"]
            answer, detail = None if number is None else repr(number), ""
        return Grade(reward=sum(parts.values()), parts=parts, correct=is_right, answer=answer, detail=detail)

    def from_ground_truth(self, question: str, truth: object) -> Problem:
        """Return the problem of a published line, whose truth is a number, also within a text or solution. Raises
        ValueError.

        With a truth of `null` no answer is correct: d1's data reader fails on negative numbers.
        """
        number: Fraction | None = None
        if isinstance(truth, (int, float)) and not isinstance(truth, bool) and abs(truth) < _TOO_LARGE:
            number = Fraction(str(truth))
        elif isinstance(truth, str):
            number = read_quantity(truth.rpartition(_MARK)[2])
        if truth is not None and (number is None or abs(number) >= _TOO_LARGE):
            raise ValueError(f"the ground truth is {preview(truth)}; a gsm8k line has a number")
        answer = "" if number is None else str(number)
        return Problem(
            problem_id=problem_id(self.name, question),
            messages=user_turn(question),
            answer=answer,
            reference_completion="",
            metadata={"written": answer, "d1": "" if number is None else repr(float(number))},
        )

    def _make_problem(self, row: Row) -> Problem:
        question, solution = row.text("question"), row.text("answer")
        written = _written(row, solution)
        number = read_quantity(written)
        if number is None:
            raise ValueError(f"{row.place}: answer ends in {preview(written)}; after {_MARK} it should have a number")
        style = self._config.prompt
        reasoning = _CALCULATION.sub("", solution.partition(_MARK)[0]).strip()
        return Problem(
            problem_id=problem_id(self.name, question),
            messages=user_turn(question if style == "compact" else f"{D1_FORMAT}\n\n{question}"),
            answer=str(number),
            reference_completion=format_completion(style, reasoning=reasoning, answer=written),
            metadata={"written": written, "d1": repr(gsm8k_truth(solution))},
        )


def _written(row: Row, solution: str) -> str:
    """Return the answer as the data spells it, which d1's training compares with: `extract_hash_answer`."""
    if _MARK not in solution:
        raise ValueError(f"{row.place}: answer is {preview(solution)}; it should end in {_MARK} and a number")
    return solution.split(_MARK)[1].strip()
