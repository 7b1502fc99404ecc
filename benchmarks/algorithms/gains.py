"""Table of what each row gains over SFT on every seed, what a round costs, and which weights it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.algorithms.report import Result, by_row, percent, seconds_per_round
from learner.config import LearnerConfig


def gains(results: Sequence[Result], learners: Mapping[str, LearnerConfig]) -> str:
    """Format the table, the row of the greatest mean gain over the tasks first. Rows without a trial of each task are
    left out.

    Args:
        results: the trials of all tasks.
        learners: the config of each row.
    """
    tasks = sorted({result.task for result in results})
    of_task = {task: dict(by_row([one for one in results if one.task == task])) for task in tasks}
    found = {row: [of_task[task].get(row) for task in tasks] for row in learners}
    complete = {row: [trials for trials in some if trials] for row, some in found.items() if all(some)}
    of_rows = {row: [_points(trials) for trials in some] for row, some in complete.items()}
    heads = [f"{task.capitalize()}: gain (worst to best), seeds" for task in tasks]
    lines = [
        f"| row | {' | '.join(heads)} | rate | CPU-s a round | weights besides the policy |",
        "|---|" + "---|" * len(tasks) + "---:|---:|---|",
    ]
    for row in sorted(complete, key=lambda row: -sum(sum(points) / len(points) for points in of_rows[row])):
        cells = (
            f"`{row}`",
            *map(_in_words, of_rows[row]),
            _each([f"{trials[0].rate:g}" for trials in complete[row]]),
            _each([f"{seconds_per_round(trials):.2f}" for trials in complete[row]]),
            _weights(learners[row]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _points(trials: Sequence[Result]) -> list[float]:
    """Return the gain of each seed, percentage points at the reported schedule; a run that ended early lost all."""
    return [percent(trial.at_seconds) - percent(trial.before) for trial in trials]


def _in_words(points: Sequence[float]) -> str:
    mean = f"{sum(points) / len(points):+.1f}"
    return f"{mean} ({min(points):+.1f} to {max(points):+.1f}), {len(points)}" if len(points) > 1 else f"{mean}, 1"


def _each(texts: Sequence[str]) -> str:
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def _weights(learner: LearnerConfig) -> str:
    """Name the networks that a learner holds besides the policy, without LoRA."""
    held = {
        "reference": learner.objective.needs_reference,
        "teacher": learner.objective.needs_teacher,
        "value model, AdamW": learner.value is not None,
    }
    return ", ".join(name for name, is_held in held.items() if is_held) or "none"
