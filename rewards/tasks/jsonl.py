"""User-supplied problems: a file of questions with reference answers, and a grader selected by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from rewards.data.columns import Columns, answer_of_row, answer_text, question_of_row
from rewards.data.conversation import parse_conversation
from rewards.data.dataset import DataConfig, DataTask, problem_id
from rewards.data.prompts import D1_FORMAT, format_completion
from rewards.data.rows import Row, json_in, preview
from rewards.data.sources import HubSplit
from rewards.maths import AnswerVerdict, Limits, MathVerifier, final_term, judge_answer
from rewards.parsing.answers import final_answer
from rewards.parsing.quantities import NO_NUMBER_FOUND, final_quantity, read_quantity
from rewards.problem import Grade, Message, Problem, Split

GraderName = Literal["exact", "choice", "number", "math", "none"]
"""How an answer is compared with the reference."""

# `B`, `(B)`, `B.`, `**B**`, `\text{B}` or `B) Paris`, and not the article of `A dog`.
_LABEL = re.compile(
    r"\W*(?:(?<=\\)(?:text|textbf|mathrm|mathbf|mbox)\{\W*)?(\w+)[\"'`*]*\s*(?:[)\]}.:].*)?$", re.DOTALL
)
_EXAMPLE = {"prompt": "What is 3 + 4?", "answer": "7"}


class JsonlConfig(DataConfig):
    """Source of the data, and how answers are compared. A row has `messages`, `prompt` or `question`; and `answer`."""

    name: Literal["jsonl"] = "jsonl"
    """Selects this task."""
    grader: GraderName
    """`exact`: the same text, ignoring white space and case. `choice`: the same letter or label, ignoring brackets and
    dots around it. `number`: the same number. `math`: mathematically equivalent, by Math-Verify. `none`: every reward
    is 0; for use with the terms of `reward`."""
    prompt: Literal["plain", "d1"] = "plain"
    """`plain` asks what the file says, `d1` puts d1's instructions on the answer format before it."""
    columns: Columns = Columns()
    """Which columns to use, for data with other column names."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.train_data is None and self.heldout_data is None:
            raise ValueError("train_data and heldout_data are both missing; a jsonl task needs one of them or both")
        if "d1" in (self.reward, self.protocol):
            raise ValueError("the first d1 has no rules for problems of your own; reward and protocol should be fixed")
        return self

    @property
    def max_grading_s(self) -> float:
        """The limit of a Math-Verify comparison for grader `math`, otherwise 0."""
        return Limits().max_comparison_s if self.grader == "math" else 0.0


class Jsonl(DataTask):
    """User-supplied problems from a file."""

    name = "jsonl"
    hub: ClassVar[Mapping[Split, HubSplit]] = {}
    example_row = _EXAMPLE

    def __init__(self, config: JsonlConfig) -> None:
        super().__init__(config)
        self._config = config
        self._compare = _comparison(config.grader)

    def grade(self, problem: Problem, text: str) -> Grade:
        """Give 1 for a correct answer, 0 otherwise; the answer is the marked one, or else the whole text. Never
        raises."""
        answer = self._said(text)
        answer = text.strip() if answer is None else answer
        verdict = self._compare(answer, problem)
        return Grade(
            reward=float(verdict.right),
            parts={"correct": float(verdict.right)},
            correct=verdict.right,
            outcome=verdict.outcome,
            answer=answer,
            detail=verdict.detail,
        )

    def example(self) -> Problem:
        """Return a built-in example, which needs no data."""
        return self._made(parse_conversation(_EXAMPLE["prompt"], "prompt"), self._right(_EXAMPLE["answer"], "answer"))

    def from_ground_truth(self, question: str, truth: object) -> Problem:
        """Return the problem with this question and this answer. Raises ValueError if it is none."""
        return self._made(parse_conversation(question, "question"), self._right(truth, "ground_truth"))

    def _make_problem(self, row: Row) -> Problem:
        columns = self._config.columns
        try:
            messages = question_of_row(row.fields, columns)
            # Without a comparison, rows need no answer.
            right = "" if self._config.grader == "none" else self._right(*answer_of_row(row.fields, columns))
            return self._made(messages, right)
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from error

    def _right(self, value: object, name: str) -> str:
        """Return the reference answer in a value, extracted as from completions: for a solution, the content of its
        box."""
        if self._config.grader == "none":
            return ""
        found = json_in(value) if isinstance(value, str) and self._config.grader != "exact" else value
        # `[1, 2]` is an interval; a list of texts gives alternative answers.
        is_several = isinstance(found, list) and all(isinstance(one, str) for one in found)
        text = answer_text(found if is_several else value, name)
        return self._said(text) or text

    def _said(self, text: str) -> str | None:
        """Extract the answer of a completion or a solution; None if none is marked."""
        return _FINAL.get(self._config.grader, final_answer)(text)

    def _made(self, messages: tuple[Message, ...], answer: str) -> Problem:
        if messages[-1].role == "assistant":
            label, messages = messages[-1].content, messages[:-1]
        else:
            label = format_completion("d1" if self._config.prompt == "d1" else "compact", reasoning="", answer=answer)
        problem = Problem(
            problem_id=problem_id(self.name, "\n".join(f"{turn.role}: {turn.content}" for turn in messages)),
            messages=_with_format(messages) if self._config.prompt == "d1" else messages,
            answer=answer,
            reference_completion=label,
        )
        if answer and not self.grade(problem, answer).correct:
            raise ValueError(
                f"answer is {preview(answer)}, which the grader {self._config.grader} cannot match with anything; take "
                "another grader or mend the answer"
            )
        return problem


def _with_format(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the conversation with d1's format instructions at the start of its first user turn."""
    first = next((index for index, turn in enumerate(messages) if turn.role == "user"), 0)
    turn = replace(messages[first], content=f"{D1_FORMAT}\n{messages[first].content}")
    return (*messages[:first], turn, *messages[first + 1 :])


def _comparison(grader: GraderName) -> Callable[[str, Problem], AnswerVerdict]:
    """Return the function that compares an answer with a problem's reference answer."""
    if grader == "math":
        verifier = MathVerifier()
        return lambda answer, problem: judge_answer(
            verifier, question=problem.messages[-1].content, gold=problem.answer, answer=answer
        )
    if grader == "number":
        return lambda answer, problem: _as_number(answer, problem.answer)
    is_right = _COMPARISONS[grader]
    return lambda answer, problem: AnswerVerdict(right=is_right(answer, problem.answer))


def _is_same_text(answer: str, right: str) -> bool:
    return " ".join(answer.split()).casefold() == " ".join(right.split()).casefold()


def _is_same_choice(answer: str, right: str) -> bool:
    given, wanted = _LABEL.match(answer), _LABEL.match(right)
    return given is not None and wanted is not None and given[1].casefold() == wanted[1].casefold()


def _as_number(answer: str, right: str) -> AnswerVerdict:
    number = read_quantity(answer)
    return (
        AnswerVerdict(detail=NO_NUMBER_FOUND) if number is None else AnswerVerdict(right=number == read_quantity(right))
    )


_FINAL: Mapping[GraderName, Callable[[str], str | None]] = {"number": final_quantity, "math": final_term}
_COMPARISONS: Mapping[GraderName, Callable[[str, str], bool]] = {
    "exact": _is_same_text,
    "choice": _is_same_choice,
    "none": lambda answer, right: False,  # noqa: ARG005 - nothing is compared
}
