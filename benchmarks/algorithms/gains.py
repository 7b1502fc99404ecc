"""Table of what each row gains over SFT on every seed, what a round costs, and which weights it holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

from benchmarks.algorithms.report import Result, by_row, percent, seconds_per_round, title
from learner.config import LearnerConfig


def gains(results: Sequence[Result], learners: Mapping[str, LearnerConfig | None], ranked_by: Collection[str]) -> str:
    """Format the table, the row of the greatest mean gain first: the mean gain (worst to best seed), number of seeds.

    Args:
        results: the trials of all tasks.
        learners: the config of each row; None for the control.
        ranked_by: the tasks whose gains are averaged. Rows without a trial of each of these are left out.
    """
    tasks = sorted({result.task for result in results}, key=lambda task: (task not in ranked_by, task))
    of_task = {task: dict(by_row([one for one in results if one.task == task])) for task in tasks}
    found = {row: {task: of_task[task][row] for task in tasks if row in of_task[task]} for row in learners}
    complete = {row: trials for row, trials in found.items() if trials.keys() >= set(ranked_by)}
    lines = [
        f"| row | {' | '.join(map(title, tasks))} | rate | CPU-s a round | weights besides the policy |",
        "|---|" + "---|" * len(tasks) + "---:|---:|---|",
    ]
    for row in sorted(complete, key=lambda row: -sum(fmean(_points(complete[row][task])) for task in ranked_by)):
        of_row = complete[row]
        cells = (
            f"`{row}`",
            *(_in_words(_points(of_row[task])) if task in of_row else "-" for task in tasks),
            _each([f"{trials[0].rate:g}" for trials in of_row.values()]),
            _each([f"{seconds_per_round(trials):.2f}" for trials in of_row.values()]),
            _weights(learners[row]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _points(trials: Sequence[Result]) -> list[float]:
    """Return the gain of each seed, percentage points at the reported schedule; a run that ended early lost all."""
    return [percent(trial.at_seconds) - percent(trial.before) for trial in trials]


def _in_words(points: Sequence[float]) -> str:
    mean = f"{fmean(points):+.1f}"
    return f"{mean} ({min(points):+.1f} to {max(points):+.1f}), {len(points)}" if len(points) > 1 else f"{mean}, 1"


def _each(texts: Sequence[str]) -> str:
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def _weights(learner: LearnerConfig | None) -> str:
    """Name the networks that a learner holds besides the policy, without LoRA."""
    if learner is None:
        return "none"
    held = {
        "reference": learner.objective.needs_reference,
        "teacher": learner.objective.needs_teacher,
        "value model, AdamW": learner.value is not None,
    }
    return ", ".join(name for name, is_held in held.items() if is_held) or "none"
