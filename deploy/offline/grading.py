"""Grading of a file of generations (`d1 grade`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from deploy.errors import UserError
from deploy.offline.item import Graded, Item
from rewards import Outcome, Problem, Task
from rewards.data.columns import Columns, answer_text
from rewards.data.conversation import parse_conversation
from rewards.data.rows import Row, value_at
from rewards.data.sources import rows_of


def read_generations(task: Task, path: Path, columns: Columns | None = None) -> list[Item]:
    """Read the lines of a file, with the columns `question`, `generation` and `ground_truth`.

    `columns` may rename the first and the last. Raises UserError, in one sentence with file and line, if a line is
    invalid.
    """
    try:
        return [_item(task, index, row, columns or Columns()) for index, row in enumerate(rows_of(path))]
    except ValueError as error:
        raise UserError(str(error).replace("task.", "")) from error


def grade_all(task: Task, items: Iterable[Item], after_each: Callable[[], object]) -> list[Graded]:
    """Grade every generation, in order."""
    graded = []
    for item in items:
        assert item.problem is not None, "each line has its problem"
        graded.append(Graded(item=item, grade=task.grade(item.problem, item.text)))
        after_each()
    return graded


def summary(graded: Sequence[Graded]) -> dict[str, Any]:
    """Summarize the grades: `correct` of `total`, outcomes, and mean rewards over the lines that have a grade.

    A line whose grading failed counts as wrong, as in published accuracies. `outcomes` counts these lines.
    """
    grades = [line.grade for line in graded]
    outcomes = Counter(grade.outcome for grade in grades)
    rated = [grade for grade in grades if grade.outcome is Outcome.GRADED]
    correct, total = (sum(grade.score[i] for grade in grades) for i in (0, 1))
    return {
        "correct": correct,
        "total": total,
        "accuracy": correct / total,
        "num_lines": len(grades),
        "num_solved": sum(grade.correct for grade in grades),
        "outcomes": {outcome.value: outcomes[outcome] for outcome in Outcome},
        "reward": _mean([grade.reward for grade in rated]),
        "parts": {name: _mean([grade.parts[name] for grade in rated]) for name in (rated[0].parts if rated else ())},
    }


def grade_json(line: Graded) -> dict[str, Any]:
    """Return the grade of one line as JSON."""
    grade, problem = line.grade, line.item.problem
    assert problem is not None, "it was graded"
    correct, total = grade.score
    return {
        "place": line.item.place,
        "correct": correct,
        "total": total,
        "answer": grade.answer,
        "ground_truth": problem.answer,
        "outcome": grade.outcome.value,
        "detail": grade.detail,
        "reward": grade.reward,
        "parts": dict(grade.parts),
    }


def _item(task: Task, index: int, row: Row, columns: Columns) -> Item:
    generation = row.value("generation")
    if not isinstance(generation, str):
        raise ValueError(f"{row.place}: generation is no text; it should be what the policy wrote")
    try:
        problem = _problem_of(task, _question(row, columns), _truth(row, columns))
    except ValueError as error:
        if str(error).startswith(row.place):
            raise
        raise ValueError(f"{row.place}: {error}") from error
    return Item(index=index, place=row.place, problem=problem, text=generation)


def _problem_of(task: Task, question: str, truth: object) -> Problem:
    """Return the problem of a line, converting the type of the ground truth if needed.

    CSV has every truth as text, and other files have numbers where a task expects text. Raises ValueError about the
    truth as it is in the file.
    """
    try:
        return task.from_ground_truth(question, truth)
    except ValueError:
        with suppress(ValueError, RecursionError):
            return task.from_ground_truth(
                question, json.loads(truth) if isinstance(truth, str) else answer_text(truth, "")
            )
        raise


def _question(row: Row, columns: Columns) -> str:
    """Return the question: a text, or the last turn of a conversation."""
    value = row.value("question") if columns.prompt is None else value_at(row.fields, columns.prompt)
    return parse_conversation(value, columns.prompt or "question")[-1].content


def _truth(row: Row, columns: Columns) -> object:
    return row.value("ground_truth") if columns.answer is None else value_at(row.fields, columns.answer)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
