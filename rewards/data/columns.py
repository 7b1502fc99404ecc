"""Column mapping for third-party data: where a row has the question and the reference answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints

from rewards.data.conversation import parse_conversation, text_of
from rewards.data.rows import leaves, preview, value_at
from rewards.problem import Message

_ASKING = ("messages", "prompt", "question")
# Column names for question and answer in third-party data, the likeliest first.
_ASKED_ELSEWHERE = (*_ASKING, "problem", "query", "instruction", "input", "conversations")
_RIGHT_ELSEWHERE = (
    *("ground_truth", "answer", "final_answer", "expected_answer", "correct_answer", "gold", "target", "label"),
    *("solution", "output"),
)

_RIGHT = "a text or a number: what is right"

_Path = Annotated[str, StringConstraints(min_length=1)]


class Columns(BaseModel):
    """Paths of question and answer in a row, for data with other column names: `answer: reward_model.ground_truth` for
    verl's. A dot leads into a column, a number into a list: `answers.text.0`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    prompt: _Path | None = None
    """The question, a text or messages. Default: `messages`, or else `prompt` or `question`."""
    answer: _Path | None = None
    """The reference answer, a text or a number. Default: `answer`."""


def question_of_row(fields: Mapping[str, object], columns: Columns) -> tuple[Message, ...]:
    """Return the question of a row as a conversation. Raises ValueError, without the row's place, if it has none."""
    name = columns.prompt or _asking(fields)
    return parse_conversation(value_at(fields, name), name)


def answer_of_row(fields: Mapping[str, object], columns: Columns) -> tuple[object, str]:
    """Return the reference answer of a row and its path. Raises ValueError, without the row's place, if it has none."""
    if columns.answer is None and fields.get("answer") is None:
        raise ValueError(f"answer is missing; it should be {_RIGHT}{_elsewhere(fields, 'answer', _RIGHT_ELSEWHERE)}")
    path = columns.answer or "answer"
    return value_at(fields, path), path


def answer_text(value: object, name: str) -> str:
    """Return a reference answer as text; a number as people write it, `7` for 7.0. Raises ValueError if it is
    neither."""
    if isinstance(value, float) and math.isnan(value):
        # The missing value of pandas.
        value = None
    match value:
        case bool():
            pass
        case int() | float() | Decimal() if math.isfinite(value):
            # Without an exponent.
            text = f"{Decimal(str(value or 0)):f}"
            return text.rstrip("0").rstrip(".") if "." in text else text
        case str():
            return text_of(value, name, "what is right")
        case {**inside} if inside:
            path = f"{name}.{next(iter(inside))}"
            raise ValueError(f"{name} is an object; task.columns.answer={path} would take a part of it")
        case [_, *_]:
            raise ValueError(
                f"{name} is a list of {len(value)}, and there can be one right answer; task.columns.answer={name}.0 "
                "would take the first"
            )
    raise ValueError(f"{name} is {preview(value)}; it should be {_RIGHT}")


def _asking(fields: Mapping[str, object]) -> str:
    """Return the name of the question's column. Raises ValueError if there is none."""
    found = next((name for name in _ASKING if fields.get(name) is not None), None)
    if found is None:
        elsewhere = _elsewhere(fields, "prompt", _ASKED_ELSEWHERE)
        raise ValueError(
            f"messages, prompt and question are missing; one should be what the policy is asked{elsewhere}"
        )
    return found


def _elsewhere(fields: Mapping[str, object], column: str, names: Sequence[str]) -> str:
    """Return the end of an error message that suggests the column probably meant."""
    found = [(names.index(own.lower()), path) for path, own in leaves(fields) if own.lower() in names]
    if found:
        return f"; task.columns.{column}={min(found)[1]} would take {min(found)[1]}"
    if column in fields:
        return ""
    return f"; the columns are {', '.join(map(str, fields)) or 'none'}: name one as task.columns.{column}"
