"""Result tables of a run: held-out accuracy after each stage, with the stage's time and work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from actors.checkpoints.best import validated_best
from actors.run_log import Event
from deploy.printing import counted, duration, metric, printable
from deploy.runs.history import Evaluation, RunHistory, read_history
from deploy.runs.stages import STAGES
from rewards.score import Score

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS = ("policy", "held-out accuracy", "95 % interval", "n", "time", "work")
"""Headings of `result_rows`."""


def result_tables(events: Iterable[Event]) -> Iterator[Table]:
    """Yield a table of the evaluated stages and their cost; then one of accuracy by schedule, if there are several."""
    events = list(events)
    history = read_history(events)
    yield _result_table(history, best_line(events, history))
    if len(names := schedule_names(history.evaluations)) > 1:
        yield _schedule_table(history, names)


def best_line(events: Sequence[Event], history: RunHistory) -> str | None:
    """Describe the version that solves most validation problems in one line; None for a run without any."""
    version = validated_best(events)
    if version is None:
        return None
    *_, found = (item for item in history.validation if item.policy_version == version)
    when = f"after {counted(found.round, 'round')}" if found.round else "before the rounds"
    return f"best by validation: version {version}, {when}: {score_text(found.score)}"


def _result_table(history: RunHistory, best: str | None) -> Table:
    from rich.table import Table
    from rich.text import Text

    lines = [f"{duration(history.seconds)} in all", *_validation_losses(history), *([best] if best else [])]
    table = Table(title=Text(printable(history.name)), caption="\n".join(lines))
    for heading in HEADINGS:
        # On 80 columns words may wrap, but numbers must not.
        is_wordy = heading in ("policy", "held-out accuracy")
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=not is_wordy)
    for row in result_rows(history):
        table.add_row(*row)
    return table


def result_rows(history: RunHistory) -> Iterator[tuple[str, ...]]:
    """Yield a row for each evaluated policy, with the time and work of its stage."""
    for label, name in _policy_names(history).items():
        if (evaluation := history.final(label)) is None:
            continue
        score, end = evaluation.score, history.phase_ends.get(label)
        low, high = score.interval
        time = duration(end["seconds"]) if end else ""
        work = f"{end['num_steps']} {STAGES[label].unit}" if end else ""
        interval = f"{100 * low:.1f} to {100 * high:.1f} %"
        yield name, f"{100 * score.accuracy:.1f} %", interval, str(score.num_problems), time, work


def _policy_names(history: RunHistory) -> dict[str, str]:
    """Return the names of a run's policies by label, with what each was trained with: `SFT + RL`."""
    names = {label: stage.name for label, stage in STAGES.items()}
    if history.final("sft") is not None:
        names["rl"] = f"{names['sft']} + {names['rl']}"
    names["control"] = f"{names['control']}: more {names['sft']}"
    if not history.planned.get("control"):
        names["control"] += ", same seconds"
    return names


def _validation_losses(history: RunHistory) -> Iterator[str]:
    """Yield a line each for SFT and the control: the loss on held-out examples before and after."""
    for phase, found in history.sft_losses.items():
        if len(found) > 1:
            first, *_, last = found
            yield f"validation loss of {STAGES[phase].name}: {metric(first['loss'])} -> {metric(last['loss'])}"


def _schedule_table(history: RunHistory, names: Iterable[str]) -> Table:
    """Build a table with a row per schedule and a column per stage that was evaluated at several."""
    from rich.table import Table

    table = Table(title="held-out accuracy by schedule, %")
    stages = evaluated_at_schedules(history)
    table.add_column("denoising")
    for name, _ in stages:
        table.add_column(name, justify="right")
    for name in names:
        table.add_row(name, *(_schedule_cell(item, name) for _, item in stages))
    return table


def evaluated_at_schedules(history: RunHistory) -> list[tuple[str, Evaluation]]:
    """Return the stages that were evaluated at several schedules, by name."""
    found = ((stage.name, history.final(label)) for label, stage in STAGES.items())
    return [(name, item) for name, item in found if item is not None and len(item.schedules) > 1]


def _schedule_cell(item: Evaluation, name: str) -> str:
    """Format the accuracy, with the mean number of steps if the schedule's name does not give it."""
    found = item.schedules.get(name)
    if found is None:
        return ""
    steps = "" if name[0].isdigit() else f" in {found.mean_steps:.1f} steps"
    return f"{100 * found.score.accuracy:.1f}{steps}"


def schedule_names(evaluations: Iterable[Evaluation]) -> list[str]:
    """Return the evaluated schedules: fixed numbers of steps first, ascending; then the others, in recipe order."""
    names = dict.fromkeys(name for item in evaluations for name in item.schedules)
    return sorted(names, key=lambda name: int(name.split()[0]) if name[0].isdigit() else math.inf)


def score_text(score: Score) -> str:
    """Format a score: `31.2 % (27.3 to 35.4), 156 of 500`."""
    low, high = score.interval
    counts = f"{score.num_correct} of {score.num_problems}"
    return f"{100 * score.accuracy:.1f} % ({100 * low:.1f} to {100 * high:.1f}), {counts}"
