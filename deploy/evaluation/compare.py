"""Two evaluations, paired on the same problems: whether one checkpoint is better than another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

import numpy as np

from deploy.errors import UserError
from deploy.evaluation.evaluate import default_out, find_subject
from deploy.evaluation.measures import bootstrap
from deploy.evaluation.record import Recorded, records_in
from deploy.evaluation.schedules import params_of, temperature_of
from deploy.program import program

# What two evaluations may differ in, and still ask the same: which problems there are is looked at by themselves.
_OF_ITS_OWN = {"checkpoint", "dtype", "batch_size", "num_problems", "num_answers"}
_OF_REWARD = {"reward", "shaping", "working", "show_working"}
_OF_DATA = {"train_data", "heldout_data", "columns", "heldout_fraction", "validation_fraction"}
_REAL = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One cell of both evaluations. Shares are 0 to 1."""

    task: str
    """What was asked."""
    gen_length: int
    """Slots of a completion."""
    schedule: str
    """How it was denoised."""
    protocol: str
    """By whose rules."""
    num_samples: int
    """Completions of each problem."""
    temperature: float | None
    """Of the draws; None where it falls from step to step."""
    num_problems: int
    """Problems that both were asked."""
    accuracies: tuple[float, float]
    """Of the first and of the second."""
    interval: tuple[float, float]
    """Of the second less the first, at 95 %: the paired bootstrap's over problems."""
    only: tuple[int, int]
    """Problems that only the first, and only the second, solves more often."""
    p: float
    """Of the exact sign test that neither is better, which is McNemar's at one sample a problem."""

    @property
    def difference(self) -> float:
        """The second less the first."""
        return self.accuracies[1] - self.accuracies[0]

    @property
    def is_real(self) -> bool:
        """Whether chance alone would hardly make it, one in twenty times at most, and who is ahead is better at more
        problems."""
        return self.p < _REAL and (self.only[1] - self.only[0]) * self.difference > 0


def find_evaluation(reference: str, runs_dir: Path) -> dict[str, Recorded]:
    """The cells of an evaluation, by name: of its directory, or where that of a run or checkpoint is by default.

    Raises UserError where there is none yet.
    """
    place = Path(reference)
    cells = records_in(place)
    if not cells:
        place = default_out(find_subject(reference, runs_dir), runs_dir)
        cells = records_in(place)
    if not cells:
        raise UserError(f"{reference} is not evaluated yet, not in {place}; `{program()} eval {reference}` does it")
    whole = {name: cell for name, cell in cells.items() if cell.is_whole}
    if not whole:
        name, cell = next(iter(cells.items()))
        there = f"{name} has {len(cell.answers)} of {cell.facts.get('num_answers')} answers"
        raise UserError(f"the evaluation in {place} is not complete: {there}; `{program()} eval` goes on with it")
    return whole


def compare(
    first: Mapping[str, Recorded], second: Mapping[str, Recorded], names: tuple[str, str], task: str | None
) -> list[Compared]:
    """The cells that both have. Raises UserError where there are none, or one asks other problems than the other."""
    common = [name for name in first if name in second and task in (None, name.partition(".")[0])]
    if not common:
        of = "" if task is None else f" of task {task}"
        raise UserError(
            f"no cell{of} is in both: {names[0]} has {', '.join(first)}; {names[1]} has {', '.join(second)}"
        )
    found = [_compared(name, first[name], second[name], names) for name in common]
    return sorted(
        found, key=lambda one: (one.task, one.protocol, one.num_samples, one.temperature or 0.0, one.gen_length)
    )


def sentence(found: Compared, names: tuple[str, str]) -> str:
    """What is to be told of a cell."""
    cell = f"{found.task}, {found.gen_length} slots, {found.schedule}"
    sign = 1 if found.difference >= 0 else -1
    better, worse = names[::-1] if sign == 1 else names
    low, high = sorted(100 * sign * bound for bound in found.interval)
    by = f"{100 * abs(found.difference):.1f} points ({tenths(low)} to {tenths(high)})"
    if found.is_real:
        return f"{cell}: {better} solves more than {worse}, by {by}, p = {found.p:.2g}"
    if not found.difference:
        return f"{cell}: no difference can be told; both solve as many"
    return f"{cell}: no difference can be told; {better} is ahead of {worse} by {by}, p = {found.p:.2g}"


def tenths(points: float) -> str:
    """A number of points with one digit; no minus before a zero."""
    return f"{round(points, 1) + 0.0:.1f}"


def _compared(name: str, first: Recorded, second: Recorded, names: tuple[str, str]) -> Compared:
    asked = [_asked(cell.facts) for cell in (first, second)]
    solved = [_solved(cell) for cell in (first, second)]
    if asked[0] != asked[1] or solved[0].keys() != solved[1].keys():
        raise UserError(f"{name} of {names[0]} and of {names[1]} do not ask the same; evaluate both alike")
    pairs = np.array([(share, solved[1][problem]) for problem, share in solved[0].items()])
    differences = pairs[:, 1] - pairs[:, 0]
    only = int((differences < 0).sum()), int((differences > 0).sum())
    params = params_of(first.facts)
    low, high = bootstrap(differences, lambda picked: picked.mean(axis=1))
    return Compared(
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


def _asked(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked, but for what two evaluations may differ in."""
    kept = {key: value for key, value in facts.items() if key not in _OF_ITS_OWN}
    return {**kept, "task": {key: value for key, value in facts["task"].items() if key not in _OF_REWARD | _OF_DATA}}


def mcnemar(only_first: int, only_second: int) -> float:
    """McNemar's exact test, two-sided: how likely a split of the discordant problems is that is no more even."""
    total, fewer = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(comb(total, count) for count in range(fewer + 1)) / 2**total)


def _solved(cell: Recorded) -> dict[str, float]:
    """The share of each problem's samples that are right."""
    found: dict[str, list[bool]] = {}
    for answer in cell.answers:
        found.setdefault(answer.problem_id, []).append(answer.correct)
    return {problem: sum(right) / len(right) for problem, right in found.items()}
