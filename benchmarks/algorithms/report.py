"""Markdown tables of trial results, for docs/results.md and docs/algorithms.md."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from rewards.score import Score

_VARIANCE = "estimator_variance"
_ALGORITHMS, _OURS = "| algorithm |", "ours, % of "


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Budget that is equal for all rows: completions and CPU seconds."""

    num_completions: int
    cpu_s: float
    """CPU seconds of sampling, grading and updating on one thread, evaluation excluded."""
    of_round: int
    """Completions per round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Result of a trial. Scores are by schedule; the first schedule is the one reported."""

    task: str
    row: str
    seed: int
    rate: float
    """Factor of the learning rate, in addition to the scaling by the row's optimizer steps."""
    lr: float
    num_updates: int
    group_size: int
    num_rounds: int
    """Total rounds."""
    cpu_s: float
    """Total CPU seconds."""
    before: Mapping[str, Any]
    """Scores of the SFT checkpoint."""
    at_completions: Mapping[str, Any] | None
    """Scores at the common budget of completions. None if the run ended earlier."""
    at_seconds: Mapping[str, Any] | None
    """Scores at the common budget of CPU seconds. None if the run ended earlier."""
    metrics: Mapping[str, float]
    """The learner's metrics, averaged over the last rounds."""
    gap: float | None
    """Estimated minus recorded log-probability of a token at the end of the run, nats."""
    failure: str | None
    """Why the run ended early, if it did."""

    @property
    def has_learned(self) -> bool:
        """Whether the final accuracy exceeds that of the SFT checkpoint."""
        return _accuracy([self.at_seconds]) > _accuracy([self.before])

    @property
    def summary(self) -> str:
        """Summarise the result in one line."""
        cells = (_cell([self.before]), _cell([self.at_completions]), _cell([self.at_seconds]))
        gained = f"{cells[0]} -> {cells[1]} (completions), {cells[2]} (seconds)"
        took = f"{self.num_rounds} rounds, {self.cpu_s:.0f} CPU-s"
        return f"{gained}; {took}. {self.failure or ''}"


def markdown(results: Sequence[Result], budgets: Mapping[str, Budget]) -> str:
    """Format a table for each task: a line per row, best first, after a line for the SFT checkpoint."""
    lines: list[str] = []
    for task, of_task in groupby(sorted(results, key=lambda result: result.task), key=lambda result: result.task):
        found = list(of_task)
        first, *others = found[0].before
        lines += [
            f"### {title(task)}",
            "",
            f"| row | seeds | updates x G | lr | {first}, after {budgets[task].num_completions:,} completions "
            f"| {first}, after {budgets[task].cpu_s:,.0f} CPU-s | {' | '.join([*others, 'CPU-s a round'])} "
            "| gap, nats | variance |",
            "|---|---:|---:|---:|---|---|" + "---:|" * (len(others) + 3),
        ]
        # Once for each seed, however many rows were tried on it.
        before = _percents(list({trial.seed: trial.before for trial in found}.values()))
        lines.append(f"| SFT |  |  |  |  | {' | '.join(before)} |  |  |  |")
        lines += [*(_line(row, trials) for row, trials in by_row(found)), ""]
    return "\n".join(lines)


def title(task: str) -> str:
    """Return the name of a task in headings."""
    return "SmolLM2" if task == "smollm2" else task.capitalize()


def write_columns(path: Path, results: Sequence[Result]) -> None:
    """Write accuracies into the table of algorithms: one column per task, in percent at the reported schedule.

    Raises ValueError if the file has no such table.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    start = next((index for index, line in enumerate(lines) if line.startswith(_ALGORITHMS)), None)
    if start is None:
        raise ValueError(f"{path} has no table that begins with {_ALGORITHMS}")
    found = {
        task: dict(by_row([one for one in results if one.task == task]))
        for task in sorted({result.task for result in results})
    }
    kept = [index for index, name in enumerate(_cells(lines[start])) if not name.startswith(_OURS)]
    end = next(index for index in range(start, len(lines)) if not lines[index].startswith("|"))
    for index in range(start, end):
        cells = [_cells(lines[index])[place] for place in kept]
        if index == start:
            more = [f"{_OURS}{task}" for task in found]
        elif index == start + 1:
            more = ["---:"] * len(found)
        else:
            more = [_percent(trials.get(cells[0].strip("`"))) for trials in found.values()]
        lines[index] = f"| {' | '.join(cells + more)} |" if index != start + 1 else f"|{'|'.join(cells + more)}|"
    path.write_text("\n".join(lines), encoding="utf-8")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line[1:-1].split("|")]


def percent(scores: Mapping[str, Any] | None) -> float:
    """Return the accuracy at the reported schedule, percent; 0 if there are no scores."""
    pooled = _that_counts([scores])
    return 0.0 if pooled is None else 100 * pooled.accuracy


def _percent(trials: Sequence[Result] | None) -> str:
    pooled = None if trials is None else _that_counts([trial.at_seconds for trial in trials])
    return "-" if pooled is None else f"{100 * pooled.accuracy:.1f}"


def by_row(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Return the trials of each row at its best learning rate, best row first.

    Rates are compared on the seeds that were tried at all of the row's rates, as other seeds may be harder.
    """
    by_rate: dict[str, dict[float, list[Result]]] = {}
    for result in results:
        by_rate.setdefault(result.row, {}).setdefault(result.lr, []).append(result)
    best = {row: max(rates.values(), key=partial(_on_seeds, _common_seeds(rates))) for row, rates in by_rate.items()}
    return sorted(best.items(), key=lambda item: -_accuracy([one.at_seconds for one in item[1]]))


def seconds_per_round(trials: Sequence[Result]) -> float:
    """Return the mean CPU seconds of a round."""
    return sum(trial.cpu_s for trial in trials) / max(1, sum(trial.num_rounds for trial in trials))


def _common_seeds(rates: Mapping[float, Sequence[Result]]) -> set[int]:
    return set.intersection(*({trial.seed for trial in trials} for trials in rates.values()))


def _on_seeds(seeds: Collection[int], trials: Sequence[Result]) -> float:
    return _accuracy([trial.at_seconds for trial in trials if not seeds or trial.seed in seeds])


def _line(row: str, trials: Sequence[Result]) -> str:
    one, at_seconds = trials[0], [trial.at_seconds for trial in trials]
    cells = (
        f"`{row}`",
        str(len(trials)),
        f"{one.num_updates} x {one.group_size}",
        f"{one.lr:.1e}",
        _cell([trial.at_completions for trial in trials]),
        _cell(at_seconds),
        *(_percents(at_seconds)[1:] or ["-"] * (len(one.before) - 1)),
        f"{seconds_per_round(trials):.2f}",
        _mean([trial.gap for trial in trials], "{:+.3f}"),
        _mean([trial.metrics.get(_VARIANCE) for trial in trials], "{:.4f}"),
    )
    failures = [trial.failure for trial in trials if trial.failure]
    return f"| {' | '.join(cells)} |" + (f" {failures[0]}" if failures else "")


def _percents(scores: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """Format the pooled accuracy at each schedule, with the mean steps of those whose number of steps varies."""
    cells = []
    for name in next((list(some) for some in scores if some), []):
        pooled = _pooled(scores, name)
        steps = [some[name]["mean_steps"] for some in scores if some]
        in_steps = f" in {sum(steps) / len(steps):.1f}" if "step" not in name else ""
        cells.append(f"{100 * pooled.accuracy:.1f}{in_steps}" if pooled else "-")
    return cells


def in_words(score: Score) -> str:
    """Format an accuracy with its interval."""
    low, high = score.interval
    return f"{100 * score.accuracy:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _cell(scores: Sequence[Mapping[str, Any] | None]) -> str:
    pooled = _that_counts(scores)
    return "ended before" if pooled is None else in_words(pooled)


def _accuracy(scores: Sequence[Mapping[str, Any] | None]) -> float:
    pooled = _that_counts(scores)
    return -math.inf if pooled is None else pooled.accuracy


def _that_counts(scores: Sequence[Mapping[str, Any] | None]) -> Score | None:
    """Pool the scores of all seeds at the first schedule."""
    return next((_pooled(scores, next(iter(some))) for some in scores if some), None)


def _pooled(scores: Sequence[Mapping[str, Any] | None], name: str) -> Score | None:
    """Pool scores over seeds. Returns None if one of them ended early."""
    if not all(scores):
        return None
    found = [some[name] for some in scores if some]
    return Score(
        num_correct=sum(one["num_correct"] for one in found), num_problems=sum(one["num_problems"] for one in found)
    )


def _mean(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return form.format(sum(known) / len(known)) if known else ""
