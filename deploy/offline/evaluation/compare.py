"""Paired comparison of two evaluations on the same problems, with significance test and interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

import numpy as np

from deploy.errors import UserError
from deploy.offline.evaluation.evaluate import default_out, find_subject
from deploy.offline.evaluation.metrics import bootstrap
from deploy.offline.evaluation.options import params_of, temperature_of
from deploy.offline.record import CellRecord, records_in
from deploy.program import program

# Facts that may differ between comparable evaluations. The problems are compared by their ids.
_OF_ITS_OWN = {"checkpoint", "dtype", "batch_size", "num_problems", "num_answers"}
_OF_REWARD = {"reward", "shaping", "working", "show_working"}
_OF_DATA = {"train_data", "heldout_data", "columns", "heldout_fraction", "validation_fraction"}
_ALPHA = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class CellComparison:
    """Comparison of one cell of both evaluations. Shares are 0 to 1."""

    task: str
    """Name of the task."""
    gen_length: int
    """Completion slots."""
    schedule: str
    """Name of the schedule."""
    protocol: str
    """Evaluation protocol."""
    num_samples: int
    """Completions per problem."""
    temperature: float | None
    """Sampling temperature; None if it decreases from step to step."""
    num_problems: int
    """Problems in both evaluations."""
    accuracies: tuple[float, float]
    """Accuracy of the first and of the second."""
    interval: tuple[float, float]
    """95 % interval of the second minus the first, by paired bootstrap over problems."""
    only: tuple[int, int]
    """Number of problems that the first solves more often, and that the second solves more often."""
    p: float
    """p-value of the exact two-sided sign test; with one sample per problem, McNemar's exact test."""

    @property
    def difference(self) -> float:
        """Accuracy of the second minus the first."""
        return self.accuracies[1] - self.accuracies[0]

    @property
    def is_significant(self) -> bool:
        """Whether the difference is significant (p < 0.05), and the more accurate checkpoint is better on more
        problems."""
        return self.p < _ALPHA and (self.only[1] - self.only[0]) * self.difference > 0


def find_evaluation(reference: str, runs_dir: Path) -> dict[str, CellRecord]:
    """Return the complete cells of an evaluation by name, from its directory or that of a run or checkpoint.

    Raises UserError if there is none yet.
    """
    place = Path(reference)
    cells = records_in(place)
    if not cells:
        place = default_out(find_subject(reference, runs_dir), runs_dir)
        cells = records_in(place)
    if not cells:
        raise UserError(f"{reference} is not evaluated yet, not in {place}; `{program()} eval {reference}` does it")
    whole = {name: cell for name, cell in cells.items() if cell.is_complete}
    if not whole:
        name, cell = next(iter(cells.items()))
        there = f"{name} has {len(cell.answers)} of {cell.facts.get('num_answers')} answers"
        raise UserError(f"the evaluation in {place} is not complete: {there}; `{program()} eval` goes on with it")
    return whole


def compare(
    first: Mapping[str, CellRecord], second: Mapping[str, CellRecord], names: tuple[str, str], task: str | None
) -> list[CellComparison]:
    """Compare the common cells. Raises UserError if there are none, or their problems or settings differ."""
    common = [name for name in first if name in second and task in (None, name.partition(".")[0])]
    if not common:
        of = "" if task is None else f" of task {task}"
        raise UserError(
            f"no cell{of} is in both: {names[0]} has {', '.join(first)}; {names[1]} has {', '.join(second)}"
        )
    found = [_compare_cell(name, first[name], second[name], names) for name in common]
    return sorted(
        found, key=lambda one: (one.task, one.protocol, one.num_samples, one.temperature or 0.0, one.gen_length)
    )


def sentence(found: CellComparison, names: tuple[str, str]) -> str:
    """Return the result of a cell as one sentence."""
    cell = f"{found.task}, {found.gen_length} slots, {found.schedule}"
    sign = 1 if found.difference >= 0 else -1
    better, worse = names[::-1] if sign == 1 else names
    low, high = sorted(100 * sign * bound for bound in found.interval)
    by = f"{100 * abs(found.difference):.1f} points ({tenths(low)} to {tenths(high)})"
    if found.is_significant:
        return f"{cell}: {better} solves more than {worse}, by {by}, p = {found.p:.2g}"
    if not found.difference:
        return f"{cell}: no difference can be told; both solve as many"
    return f"{cell}: no difference can be told; {better} is ahead of {worse} by {by}, p = {found.p:.2g}"


def tenths(points: float) -> str:
    """Format points with one decimal digit, without a minus sign before zero."""
    return f"{round(points, 1) + 0.0:.1f}"


def _compare_cell(name: str, first: CellRecord, second: CellRecord, names: tuple[str, str]) -> CellComparison:
    settings = [_shared_settings(cell.facts) for cell in (first, second)]
    solved = [
        {problem: sum(one.correct for one in some) / len(some) for problem, some in cell.by_problem.items()}
        for cell in (first, second)
    ]
    if settings[0] != settings[1] or solved[0].keys() != solved[1].keys():
        raise UserError(f"{name} of {names[0]} and of {names[1]} do not ask the same; evaluate both alike")
    pairs = np.array([(share, solved[1][problem]) for problem, share in solved[0].items()])
    differences = pairs[:, 1] - pairs[:, 0]
    only = int((differences < 0).sum()), int((differences > 0).sum())
    params = params_of(first.facts)
    low, high = bootstrap(differences, lambda picked: picked.mean(axis=1))
    return CellComparison(
        task=first.facts["task"]["name"],
        gen_length=params.gen_length,
        schedule=params.schedule_name,
        protocol=first.facts["protocol"],
        num_samples=first.facts["num_samples"],
        temperature=temperature_of(params),
        num_problems=len(pairs),
        accuracies=(float(pairs[:, 0].mean()), float(pairs[:, 1].mean())),
        interval=(low, high),
        only=only,
        p=mcnemar(*only),
    )


def _shared_settings(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that comparable evaluations must share."""
    kept = {key: value for key, value in facts.items() if key not in _OF_ITS_OWN}
    return {**kept, "task": {key: value for key, value in facts["task"].items() if key not in _OF_REWARD | _OF_DATA}}


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of McNemar's exact test on the discordant problems."""
    total, fewer = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(comb(total, count) for count in range(fewer + 1)) / 2**total)
