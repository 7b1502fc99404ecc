"""Terminal output of `d1 grade` and `d1 tasks`: summary and failed lines of a file, and the tasks with an example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deploy.offline.item import Answer
from deploy.printing import counted, printable
from deploy.recipe.validation_errors import shortened
from rewards import Outcome
from rewards.score import Score

_END_SHOWN = 300
_QUESTION_SHOWN = 200
_SPLITS = {"train": "train", "validation": "validation", "heldout": "held out"}


def summary_table(found: Mapping[str, Any]) -> Table:
    """Return a table of the results of a file."""
    table = Table(title=f"{found['task']}, protocol {found['protocol']}", show_header=False)
    low, high = Score(num_correct=found["correct"], num_problems=found["total"]).interval
    # Parts of one problem, such as Sudoku cells, are not independent: an interval over them would be too narrow.
    interval = f" ({low:.1%} to {high:.1%})" if found["total"] == found["num_lines"] else ""
    table.add_row("correct", f"{found['correct']:,} of {found['total']:,}: {found['accuracy']:.1%}{interval}")
    if found["total"] != found["num_lines"]:
        table.add_row("solved", f"{found['num_solved']:,} of {counted(found['num_lines'], 'line')}")
    for outcome, count in found["outcomes"].items():
        table.add_row(outcome, f"{count:,}")
    if found["reward"] is not None:
        table.add_row("reward, mean", f"{found['reward']:.3f}")
    for name, value in found["parts"].items():
        table.add_row(f"  {name}", f"{value:.3f}")
    return table


def failures_view(graded: Sequence[tuple[str, Answer]], count: int) -> Iterator[Panel]:
    """Yield panels of up to `count` incorrect lines, ungraded ones first: question, parsed answer and right answer."""
    wrong = [(place, answer) for place, answer in graded if not answer.correct]
    wrong.sort(key=lambda line: line[1].outcome == Outcome.GRADED)
    for place, answer in wrong[:count]:
        text, body = answer.generation, Text()
        _add(body, "question", shortened(answer.question, _QUESTION_SHOWN))
        _add(body, "ends with", "..." * (len(text) > _END_SHOWN) + text[-_END_SHOWN:])
        _add(body, "read as", "no answer" if answer.answer is None else shortened(answer.answer, _QUESTION_SHOWN))
        _add(body, "right", shortened(answer.ground_truth, _QUESTION_SHOWN))
        if answer.num_items > 1:
            _add(body, "score", f"{answer.num_right} of {answer.num_items}")
        if answer.outcome != Outcome.GRADED or answer.detail:
            _add(body, answer.outcome, answer.detail)
        yield Panel(body, title=Text(printable(place)), title_align="left")


def _add(body: Text, label: str, value: str) -> None:
    if body:
        body.append("\n")
    body.append(f"{label}: ", style="bold")
    body.append(printable(value.strip()))


def tasks_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a row for each task."""
    table = Table("task", "what it asks", "train", "held out", "an answer", title="Tasks", show_lines=True)
    for task in found:
        sizes = task["sizes"]
        answer = task["answer"].strip().partition("\n")[0]
        table.add_row(*map(_plain, (task["name"], task["about"], sizes["train"], sizes["heldout"], answer)))
    return table


def task_view(task: Mapping[str, Any]) -> Group:
    """Return the view of one task, with its example."""
    sizes = task["sizes"]
    return Group(
        _plain(f"{task['name']}: {task['about']}"),
        _plain("; ".join(f"{_SPLITS[name]}: {size}" for name, size in sizes.items())),
        *map(_plain, task["remarks"]),
        Panel(_plain(task["prompt"].strip()), title="prompt", title_align="left"),
        Panel(_plain(task["demonstration"].strip()), title="a right completion", title_align="left"),
        _plain(f"answer: {task['answer']}"),
    )


def _plain(text: str) -> Text:
    return Text(printable(text))
