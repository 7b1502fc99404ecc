"""The table of a reproduction: accuracy by row, task and length, with intervals over seeds; as JSON and as Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from deploy.evaluation.evaluate import RESULTS
from deploy.printing import share
from deploy.reproduce import paper
from deploy.reproduce.plan import Evaluation, Step
from rollout.score import Score

# The 97.5th percentile of Student's distribution, by degrees of freedom from 1.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_NORMAL = 1.96


@dataclass(frozen=True, kw_only=True, slots=True)
class CellOfTable:
    """A row of the table at one task and length."""

    row: str
    task: str
    length: int
    seeds: dict[int, float]
    """Accuracy by seed, 0 to 1."""
    num_problems: int
    """Of each seed."""
    accuracy: float
    """Their mean."""
    interval: tuple[float, float]
    """At 95 %: see `interval_of`."""
    items: float | None
    """Mean share of a problem's parts that are right, where problems have parts (a Sudoku's cells)."""
    mean_forwards: float


def read_cells(steps: Sequence[Step], out: Path) -> list[CellOfTable]:
    """The cells of which anything is there, in the order of the plan."""
    found: dict[tuple[str, str, int], dict[int, dict[str, Any]]] = {}
    for step in steps:
        if isinstance(step, Evaluation):
            path = out / "evaluations" / step.name / RESULTS
            if path.is_file():
                (cell,) = json.loads(path.read_text(encoding="utf-8"))["cells"]
                found.setdefault((step.row, step.task, step.length), {})[step.seed] = cell
    return [_cell(row, task, length, by_seed) for (row, task, length), by_seed in found.items()]


def _cell(row: str, task: str, length: int, by_seed: dict[int, dict[str, Any]]) -> CellOfTable:
    accuracies = {seed: cell["accuracy"] for seed, cell in by_seed.items()}
    cells = list(by_seed.values())
    parts = [cell["items"] for cell in cells if "items" in cell]
    return CellOfTable(
        row=row,
        task=task,
        length=length,
        seeds=accuracies,
        num_problems=cells[0]["num_problems"],
        accuracy=fmean(accuracies.values()),
        interval=interval_of(list(accuracies.values()), cells[0]["num_problems"]),
        items=fmean(parts) if parts else None,
        mean_forwards=fmean(cell["mean_forwards"] for cell in cells),
    )


def interval_of(accuracies: Sequence[float], num_problems: int) -> tuple[float, float]:
    """The 95 % interval of the mean over seeds: Student's, but nowhere narrower than Wilson's over the problems.

    All seeds are asked the same problems: seeds that happen to agree, at 0 too, say nothing of others.
    """
    mean, count = fmean(accuracies), len(accuracies)
    low, high = Score(num_correct=round(mean * num_problems), num_problems=num_problems).interval
    if count < 2:
        return low, high
    factor = _STUDENT[count - 2] if count - 2 < len(_STUDENT) else _NORMAL
    half = factor * stdev(accuracies) / math.sqrt(count)
    return max(0.0, min(low, mean - half)), min(1.0, max(high, mean + half))


def as_json(cells: Sequence[CellOfTable], facts: dict[str, Any]) -> str:
    """What a program reads."""
    return json.dumps({**facts, "cells": [asdict(cell) for cell in cells]}, indent=1) + "\n"


def as_markdown(cells: Sequence[CellOfTable], rows: Sequence[str], facts: dict[str, Any]) -> str:
    """What a person reads: a table for each task, and the paper's."""
    parts = [f"# {facts['title']}\n", f"{facts['about']}\n", _facts(facts)]
    tasks = dict.fromkeys(cell.task for cell in cells)
    parts += [_table([cell for cell in cells if cell.task == task], rows, task) for task in tasks]
    return "\n".join([*parts, _paper()])


def _facts(facts: dict[str, Any]) -> str:
    lines = [f"- {name.replace('_', ' ')}: {value}" for name, value in facts.items() if name not in ("title", "about")]
    note = (
        "Held-out accuracy at temperature 0 in half as many denoise steps as slots, of the last policy of each "
        "training, in percent: the mean over seeds, its 95 % interval (Student's over seeds, nowhere narrower than "
        "Wilson's over problems), and each seed's."
    )
    return "\n".join([*lines, "", note, ""])


def _table(cells: Sequence[CellOfTable], rows: Sequence[str], task: str) -> str:
    lengths = sorted({cell.length for cell in cells})
    lines = [f"## {task}, n = {cells[0].num_problems}", ""]
    lines.append(_line(["", *(f"{length} slots" for length in lengths), *_parts_heading(cells, lengths)]))
    lines.append(_line(["---", *["---:"] * (len(lengths) + len(_parts_heading(cells, lengths)))]))
    by_place = {(cell.row, cell.length): cell for cell in cells}
    for row in rows:
        of_row = [by_place.get((row, length)) for length in lengths]
        if any(of_row):
            has_parts = any(cell.items is not None for cell in cells)
            parts = [_percent(None if cell is None else cell.items) for cell in of_row] if has_parts else []
            lines.append(_line([row, *map(_said, of_row), *parts]))
    return "\n".join([*lines, ""])


def _parts_heading(cells: Sequence[CellOfTable], lengths: Sequence[int]) -> list[str]:
    """Where problems have parts, these are counted too."""
    return [f"parts, {length}" for length in lengths] if any(cell.items is not None for cell in cells) else []


def _said(cell: CellOfTable | None) -> str:
    if cell is None:
        return ""
    mean, _, interval = share(cell.accuracy, cell.interval).partition(" ")
    seeds = "" if len(cell.seeds) == 1 else f" [{', '.join(_percent(value) for value in cell.seeds.values())}]"
    return f"**{mean}** {interval}{seeds}"


def _percent(part: float | None) -> str:
    return "" if part is None else f"{100 * part:.1f}"


def _paper() -> str:
    tasks = list(next(iter(paper.ROWS.values())))
    lines = ["## The paper's numbers, of LLaDA-8B-Instruct", "", paper.NOTE, ""]
    lengths = "/".join(map(str, paper.LENGTHS))
    lines += [_line(["at " + lengths + " slots", *tasks]), _line(["---", *["---:"] * len(tasks)])]
    lines += [_line([row, *("/".join(map(str, found[task])) for task in tasks)]) for row, found in paper.ROWS.items()]
    return "\n".join([*lines, ""])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
