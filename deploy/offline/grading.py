"""Grading of a file of generations (`d1 grade`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from deploy.errors import UserError
from deploy.offline.item import Answer, Batch, Item
from deploy.offline.pool import PoolSettings, answer_batches
from deploy.offline.worker import WorkerConfig
from rewards import Outcome, Problem, Task, TaskConfig
from rewards.data.columns import Columns, answer_text
from rewards.data.conversation import parse_conversation
from rewards.data.rows import Row, value_at
from rewards.data.sources import rows_of

_BATCH_SIZE = 64


def read_generations(task: Task, path: Path, columns: Columns | None = None) -> list[Item]:
    """Read the lines of a file, with the columns `question`, `generation` and `ground_truth`.

    `columns` may rename the first and the last. Raises UserError, in one sentence with file and line, if a line is
    invalid.
    """
    try:
        return [_item(task, index, row, columns or Columns()) for index, row in enumerate(rows_of(path))]
    except ValueError as error:
        raise UserError(str(error).replace("task.", "")) from error


def grade_all(
    items: Sequence[Item], task: TaskConfig, pool: PoolSettings, after_each: Callable[[int], object]
) -> list[Answer]:
    """Grade every generation with a pool of workers, in order.

    `after_each` receives the number of graded ones. Raises as `answer_batches`.
    """
    starts = range(0, len(items), _BATCH_SIZE)
    batches = [Batch(index=start, items=tuple(items[start : start + _BATCH_SIZE]), task=task) for start in starts]
    found: dict[int, Answer] = {}
    for done in answer_batches(WorkerConfig(checkpoint=None), pool, batches):
        found |= enumerate(done.answers, start=done.index)
        after_each(len(found))
    return [found[index] for index in range(len(items))]


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Summarize the grades: `correct` of `total`, outcomes, and mean rewards over the lines that have a grade.

    A line whose grading failed counts as wrong, as in published accuracies. `outcomes` counts these lines.
    """
    outcomes = Counter(answer.outcome for answer in answers)
    rated = [answer for answer in answers if answer.outcome == Outcome.GRADED]
    correct, total = sum(answer.num_right for answer in answers), sum(answer.num_items for answer in answers)
    return {
        "correct": correct,
        "total": total,
        "accuracy": correct / total,
        "num_lines": len(answers),
        "num_solved": sum(answer.correct for answer in answers),
        "outcomes": {outcome.value: outcomes[outcome] for outcome in Outcome},
        "reward": _mean([answer.reward for answer in rated]),
        "parts": {name: _mean([answer.parts[name] for answer in rated]) for name in (rated[0].parts if rated else ())},
    }


def grade_json(place: str, answer: Answer) -> dict[str, Any]:
    """Return the grade of the line at `place` as JSON."""
    return {
        "place": place,
        "correct": answer.num_right,
        "total": answer.num_items,
        **{key: getattr(answer, key) for key in ("answer", "ground_truth", "outcome", "detail", "reward", "parts")},
    }


def _item(task: Task, index: int, row: Row, columns: Columns) -> Item:
    generation = row.value("generation")
    if not isinstance(generation, str):
        raise ValueError(f"{row.place}: generation is no text; it should be what the policy wrote")
    try:
        truth = row.value("ground_truth") if columns.answer is None else value_at(row.fields, columns.answer)
        asked = row.value("question") if columns.prompt is None else value_at(row.fields, columns.prompt)
        # The last turn, if it is a conversation.
        question = parse_conversation(asked, columns.prompt or "question")[-1].content
        problem = _problem_of(task, question, truth)
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


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
