"""MATH: competition problems whose answer is an expression (arXiv 2103.03874), tested on MATH-500."""

from __future__ import annotations

from typing import Literal

from rewards.data.dataset import DataConfig, DataTask, problem_id
from rewards.data.prompts import D1_FORMAT, D1_MATHS, PromptStyle, format_completion, user_turn
from rewards.data.rows import Row, preview
from rewards.data.sources import HubSplit
from rewards.first_d1 import parsers as d1_parsers
from rewards.first_d1.maths import equivalent, math_answer
from rewards.first_d1.training_rewards import math_parts
from rewards.maths import AnswerVerdict, Limits, MathVerifier, final_term, judge_answer, same_spelling
from rewards.parsing.answers import last_answer
from rewards.parsing.boxed import last_boxed
from rewards.problem import Grade, Problem, Split

_HUB = {
    Split.TRAIN: HubSplit(repo="ankner/math-500", split="train", num_rows=7500),
    Split.HELDOUT: HubSplit(repo="HuggingFaceH4/MATH-500", split="test", num_rows=500),
}
_EXAMPLE = {
    "problem": "Solve $4x + 3 = 5$.",
    "solution": "Subtracting $3$ and dividing by $4$, we find $x = \\boxed{\\frac{1}{2}}$.",
}
_MAX_GOLD_CHARS = Limits().max_chars


class Math500Config(DataConfig):
    """Source and prompt of the MATH problems.

    They come from `ankner/math-500` and `HuggingFaceH4/MATH-500`, or from files with the columns `problem`, `solution`
    and, if the answer is not in the solution's box, `answer`.
    """

    name: Literal["math500"] = "math500"
    """Selects this task."""
    prompt: PromptStyle = "d1"
    """`d1` for the wording of the d1 code, `compact` for the problem alone."""

    @property
    def max_grading_s(self) -> float:
        """The limit of a comparison."""
        return Limits().max_comparison_s


class Math500(DataTask):
    """MATH: competition problems, tested on MATH-500."""

    name = "math500"
    hub = _HUB
    example_row = _EXAMPLE

    def __init__(self, config: Math500Config) -> None:
        super().__init__(config)
        self._config = config
        self._verifier = MathVerifier()

    def grade(self, problem: Problem, text: str) -> Grade:
        """Grade whether the final answer is equivalent to the reference. Never raises.

        Fixed parts: `answer` (0 or 0.1) for a closed answer tag, `correct` (0 or 0.9). d1's are those of `math_parts`.
        """
        answer = final_term(text)
        verdict = AnswerVerdict()
        if answer is not None and "fixed" in (self._config.reward, self._config.protocol):
            question = problem.messages[-1].content
            verdict = judge_answer(self._verifier, question=question, gold=problem.answer, answer=answer)
        if self._config.reward == "d1":
            parts = math_parts(text, problem.metadata["d1"])
        else:
            is_tagged = last_answer(text) is not None
            parts = {"answer": 0.1 if is_tagged else 0.0, "correct": 0.9 if verdict.right else 0.0}
        is_right = verdict.right
        if self._config.protocol == "d1":
            answer = math_answer(text)
            is_right = answer is not None and equivalent(answer, problem.metadata["d1"])
        return Grade(
            reward=sum(parts.values()),
            parts=parts,
            correct=is_right,
            outcome=verdict.outcome,
            answer=answer,
            detail=verdict.detail,
        )

    def from_ground_truth(self, question: str, truth: object) -> Problem:
        """Return the problem of a published line, whose truth is a text. Raises ValueError."""
        if not isinstance(truth, str) or not truth.strip():
            raise ValueError(f"the ground truth is {preview(truth)}; a math500 line has a text")
        return Problem(
            problem_id=problem_id(self.name, question),
            messages=user_turn(question),
            answer=truth,
            reference_completion="",
            metadata={"d1": truth},
        )

    def _make_problem(self, row: Row) -> Problem:
        question, solution = row.text("problem"), row.text("solution")
        answer, published = _answers(row, solution)
        style = self._config.prompt
        prompt = f"{D1_FORMAT}\n\n{D1_MATHS} \n\n{question}"
        return Problem(
            problem_id=problem_id(self.name, question),
            messages=user_turn(question if style == "compact" else prompt),
            answer=answer,
            reference_completion=format_completion(style, reasoning=solution, answer=f"\\boxed{{{answer}}}"),
            metadata={"d1": published},
        )


def _answers(row: Row, solution: str) -> tuple[str, str]:
    """Return a row's answer as we extract it and as d1 does. Raises ValueError if there is none."""
    if "answer" in row.fields:
        answer = published = row.text("answer")
    else:
        boxed = d1_parsers.boxed(solution)
        published = solution if boxed is None else boxed
        # MATH also has `\boxed 5`, which d1 reads up to a dollar sign.
        answer = last_boxed(solution) or (published.strip() if published != solution else "")
    if not same_spelling(answer, answer):
        raise ValueError(
            f"{row.place}: no answer in solution, {preview(solution)}; it should be in a \\boxed{{}}, or in column "
            "answer"
        )
    if len(answer) > _MAX_GOLD_CHARS:
        raise ValueError(f"{row.place}: the answer has {len(answer)} characters; {_MAX_GOLD_CHARS} can be compared")
    return answer, published
