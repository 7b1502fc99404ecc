"""Measured cells of the results table: storage as JSON Lines, and formatting as Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

from deploy.printing import share
from rewards.score import Score

# 97.5th percentile of Student's t distribution, by degrees of freedom from 1.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_NORMAL = 1.96
MISSING = "not measured"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Place:
    """Position of a number in the table."""

    task: str
    """Task, one table each."""
    row: str
    """Training of the policy."""
    length: int
    """Column: completion slots."""
    seed: int
    """Seed of the training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurement of a cell."""

    place: Place
    """Position in the table."""
    num_correct: int
    """Held-out problems that the policy solved."""
    num_problems: int
    """Held-out problems in the evaluation."""
    training_s: float
    """Seconds of all training runs from the base to the policy, evaluations between the rounds included."""
    evaluation_s: float
    """Seconds of the evaluation, summed over its workers."""
    hardware: str
    """Hardware of the machine that evaluated it."""
    date: str
    """Date of the evaluation, YYYY-MM-DD."""


def read_cells(path: Path) -> list[Measured]:
    """Read the cells of a file. Returns none if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    values = map(json.loads, lines)
    return [Measured(**{**value, "place": Place(**value["place"])}) for value in values]


def add_cell(path: Path, cell: Measured) -> None:
    """Append a cell to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(cell)) + "\n")


def interval_of(accuracies: Sequence[float], num_problems: int) -> tuple[float, float]:
    """Compute the 95 % interval of the mean over seeds: Student's t, never narrower than Wilson's over the problems.

    All seeds get the same problems, so agreement between seeds is no evidence about other problems.
    """
    mean, count = fmean(accuracies), len(accuracies)
    low, high = Score(num_correct=round(mean * num_problems), num_problems=num_problems).interval
    if count < 2:
        return low, high
    factor = _STUDENT[count - 2] if count - 2 < len(_STUDENT) else _NORMAL
    half = factor * stdev(accuracies) / math.sqrt(count)
    return max(0.0, min(low, mean - half)), min(1.0, max(high, mean + half))


def as_markdown(cells: Sequence[Measured], task: str, lengths: Sequence[int], rows: Sequence[str]) -> str:
    """Format a task's table with all rows and lengths, measured or not."""
    facts = ("seeds", "training, s", "evaluation, s", "hardware", "date")
    lines = [_line([f"{task}, %", *(f"{length} slots" for length in lengths), *facts])]
    lines.append(_line(["---", *["---:"] * len(lengths), *["---"] * len(facts)]))
    for row in rows:
        of_row = [cell for cell in cells if (cell.place.task, cell.place.row) == (task, row)]
        values = [_value([cell for cell in of_row if cell.place.length == length]) for length in lengths]
        lines.append(_line([row, *values, *_facts(of_row)]))
    return "\n".join([*lines, ""])


def _value(cells: Sequence[Measured]) -> str:
    if not cells:
        return MISSING
    accuracies = [cell.num_correct / cell.num_problems for cell in cells]
    return share(fmean(accuracies), interval_of(accuracies, cells[0].num_problems))


def _facts(cells: Sequence[Measured]) -> list[str]:
    """Format the further columns of a row, over all its lengths and seeds."""
    seeds = sorted({cell.place.seed for cell in cells})
    trained = {cell.place.seed: cell.training_s for cell in cells}
    return [
        ", ".join(map(str, seeds)),
        ", ".join(f"{trained[seed]:.0f}" for seed in seeds),
        f"{sum(cell.evaluation_s for cell in cells):.0f}" if cells else "",
        ", ".join(dict.fromkeys(cell.hardware for cell in cells)),
        ", ".join(dict.fromkeys(cell.date for cell in cells)),
    ]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
