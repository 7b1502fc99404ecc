"""Problems of your own: a file of conversations with their answers, and a grader by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from rewards.data.columns import Columns, answer_text, asked_in, right_in
from rewards.data.conversation import asked
from rewards.data.dataset import DataConfig, DataTask, problem_id
from rewards.data.prompts import D1_FORMAT, demonstration
from rewards.data.rows import Row, json_in, shown
from rewards.data.sources import HubSplit
from rewards.maths import Limits, MathVerifier, Verdict, answers, final_term
from rewards.problem import Grade, Message, Problem, Split
from rewards.reading.answers import final_answer
from rewards.reading.quantities import NOTHING_READ, final_quantity, read_quantity

GraderName = Literal["exact", "choice", "number", "math", "none"]
"""How an answer is compared with the right one."""

# `B`, `(B)`, `B.`, `**B**`, `\text{B}` or `B) Paris`, and not the article of `A dog`.
_LABEL = re.compile(
    r"\W*(?:(?<=\\)(?:text|textbf|mathrm|mathbf|mbox)\{\W*)?(\w+)[\"'`*]*\s*(?:[)\]}.:].*)?$", re.DOTALL
)
_EXAMPLE = {"prompt": "What is 3 + 4?", "answer": "7"}


class JsonlConfig(DataConfig):
    """Which data, and how its answers are compared. A row has `messages`, `prompt` or `question`; and `answer`."""

    name: Literal["jsonl"] = "jsonl"
    """Selects this task."""
    grader: GraderName
    """`exact`: the same text, but for white space and case. `choice`: the same letter or label, whatever brackets or
    dots are around it. `number`: the same number. `math`: the same meaning, by Math-Verify. `none`: every reward is 0,
    for what the terms of `reward` judge."""
    prompt: Literal["plain", "d1"] = "plain"
    """`plain` asks what the file says, `d1` says before it in which format to answer."""
    columns: Columns = Columns()
    """Where a row has them, in data with other columns."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.train_data is None and self.heldout_data is None:
            raise ValueError("train_data and heldout_data are both missing; a jsonl task needs one of them or both")
        if "d1" in (self.reward, self.protocol):
            raise ValueError("the first d1 has no rules for problems of your own; reward and protocol should be fixed")
        return self

    @property
    def longest_grade_s(self) -> float:
        """That of a comparison, where Math-Verify compares."""
        return Limits().longest_s if self.grader == "math" else 0.0


class Jsonl(DataTask):
    """Problems of your own, from a file."""

    name = "jsonl"
    hub: ClassVar[Mapping[Split, HubSplit]] = {}
    example_row = _EXAMPLE

    def __init__(self, config: JsonlConfig) -> None:
        super().__init__(config)
        self._config = config
        self._compare = _comparison(config.grader)

    def grade(self, problem: Problem, text: str) -> Grade:
        """1 for a right answer, 0 otherwise; the answer is `final_answer`'s, or the whole text. Never raises."""
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
        """One of ours, which needs no data."""
        return self._made(asked(_EXAMPLE["prompt"], "prompt"), self._right(_EXAMPLE["answer"], "answer"))

    def posed(self, question: str, truth: object) -> Problem:
        """The problem with this question and this answer. Raises ValueError."""
        return self._made(asked(question, "question"), self._right(truth, "ground_truth"))

    def _pose(self, row: Row) -> Problem:
        columns = self._config.columns
        try:
            messages = asked_in(row.fields, columns)
            # Where nothing is compared, rows need no answer.
            right = "" if self._config.grader == "none" else self._right(*right_in(row.fields, columns))
            return self._made(messages, right)
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from error

    def _right(self, value: object, name: str) -> str:
        """The answer that a value is, read as completions are: that of a solution is what its box holds."""
        if self._config.grader == "none":
            return ""
        found = json_in(value) if isinstance(value, str) and self._config.grader != "exact" else value
        # `[1, 2]` is an interval; a list of texts is what some sets accept.
        is_several = isinstance(found, list) and all(isinstance(one, str) for one in found)
        text = answer_text(found if is_several else value, name)
        return self._said(text) or text

    def _said(self, text: str) -> str | None:
        """Read the answer in a completion or a solution; None where it marks none."""
        return _FINAL.get(self._config.grader, final_answer)(text)

    def _made(self, messages: tuple[Message, ...], answer: str) -> Problem:
        if messages[-1].role == "assistant":
            label, messages = messages[-1].content, messages[:-1]
        else:
            label = demonstration("d1" if self._config.prompt == "d1" else "compact", reasoning="", answer=answer)
        problem = Problem(
            problem_id=problem_id(self.name, "\n".join(f"{turn.role}: {turn.content}" for turn in messages)),
            messages=_with_format(messages) if self._config.prompt == "d1" else messages,
            answer=answer,
            demonstration=label,
        )
        if answer and not self.grade(problem, answer).correct:
            raise ValueError(
                f"answer is {shown(answer)}, which the grader {self._config.grader} cannot match with anything; take "
                "another grader or mend the answer"
            )
        return problem


def _with_format(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The conversation with d1's format at the head of its first user's turn."""
    first = next((index for index, turn in enumerate(messages) if turn.role == "user"), 0)
    turn = replace(messages[first], content=f"{D1_FORMAT}\n{messages[first].content}")
    return (*messages[:first], turn, *messages[first + 1 :])


def _comparison(grader: GraderName) -> Callable[[str, Problem], Verdict]:
    """What compares an answer with a problem's right one."""
    if grader == "math":
        verifier = MathVerifier()
        return lambda answer, problem: answers(
            verifier, question=problem.messages[-1].content, gold=problem.answer, answer=answer
        )
    if grader == "number":
        return lambda answer, problem: _as_number(answer, problem.answer)
    is_right = _COMPARISONS[grader]
    return lambda answer, problem: Verdict(right=is_right(answer, problem.answer))


def _is_same_text(answer: str, right: str) -> bool:
    return " ".join(answer.split()).casefold() == " ".join(right.split()).casefold()


def _is_same_choice(answer: str, right: str) -> bool:
    given, wanted = _LABEL.match(answer), _LABEL.match(right)
    return given is not None and wanted is not None and given[1].casefold() == wanted[1].casefold()


def _as_number(answer: str, right: str) -> Verdict:
    number = read_quantity(answer)
    return Verdict(detail=NOTHING_READ) if number is None else Verdict(right=number == read_quantity(right))


_FINAL: Mapping[GraderName, Callable[[str], str | None]] = {"number": final_quantity, "math": final_term}
_COMPARISONS: Mapping[GraderName, Callable[[str, str], bool]] = {
    "exact": _is_same_text,
    "choice": _is_same_choice,
    "none": lambda answer, right: False,  # noqa: ARG005 - nothing is compared
}
