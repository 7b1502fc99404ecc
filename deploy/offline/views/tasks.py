"""Terminal output of `d1 tasks`: the table of tasks, and the view of one task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deploy.printing import printable

_SPLITS = {"train": "train", "validation": "validation", "heldout": "held out"}


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
