"""The result of a run: held-out accuracy after each stage, with what each stage cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.checkpoints.best import validated_best
from actors.run_log import VALIDATION, Event
from deploy.printing import counted, duration, metric, printable
from deploy.runs.history import Evaluation, RunHistory, read_history
from rollout.score import Score

if TYPE_CHECKING:
    from rich.table import Table

_SHORT = {"start": "start", "sft": "SFT", "rl": "RL", "control": "control"}
NAMES = {"untrained": "untrained", "start": "start", "sft": "SFT", "rl": "RL", "control": "control: more SFT"}
"""What policies are called, by the label of their evaluation."""
_HEADINGS = ("policy", "held-out accuracy", "95 % interval", "n", "time", "work")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    name: str
    evaluation: Evaluation
    phase_end: Event | None
    unit: str

    def cells(self) -> tuple[str, ...]:
        score, end = self.evaluation.score, self.phase_end
        low, high = score.interval
        time = duration(end["seconds"]) if end else ""
        work = f"{end['num_steps']} {self.unit}" if end else ""
        interval = f"{100 * low:.1f} to {100 * high:.1f} %"
        return self.name, f"{100 * score.accuracy:.1f} %", interval, str(score.num_problems), time, work


def result_tables(events: Iterable[Event]) -> Iterator[Table]:
    """What each stage came to and cost, a row for each that was evaluated; then its accuracy at each schedule, where
    several were asked for."""
    events = list(events)
    history = read_history(events)
    yield _result_table(history, best_line(events))
    if len(names := schedule_names(history.evaluations)) > 1:
        yield _schedule_table(history, names)


def best_line(events: Sequence[Event]) -> str | None:
    """Which version solves most validation problems, in a line; None of a run without any."""
    version = validated_best(events)
    if version is None:
        return None
    (*_, found) = (
        event
        for event in events
        if event["event"] == "evaluation" and (event["label"], event["policy_version"]) == (VALIDATION, version)
    )
    score = Score(num_correct=found["num_correct"], num_problems=found["num_problems"])
    when = f"after {counted(found['round'], 'round')}" if found["round"] else "before the rounds"
    return f"best by validation: version {version}, {when}: {score_text(score)}"


def _result_table(history: RunHistory, best: str | None) -> Table:
    from rich.table import Table
    from rich.text import Text

    lines = [f"{duration(history.seconds)} in all", *_validation_losses(history), *([best] if best else [])]
    table = Table(title=Text(printable(history.name)), caption="\n".join(lines))
    for heading in _HEADINGS:
        # On 80 columns words may wrap, and a number not.
        is_wordy = heading in ("policy", "held-out accuracy")
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=not is_wordy)
    for row in _rows(history):
        table.add_row(*row.cells())
    return table


def _validation_losses(history: RunHistory) -> Iterator[str]:
    """What the loss on held-out examples was before and after SFT, and the control, in lines."""
    for phase, found in history.sft_losses.items():
        if len(found) > 1:
            first, *_, last = found
            yield f"validation loss of {_SHORT[phase]}: {metric(first['loss'])} -> {metric(last['loss'])}"


def _schedule_table(history: RunHistory, names: Iterable[str]) -> Table:
    """A row for each schedule, a column for each stage that was evaluated at it."""
    from rich.table import Table

    table = Table(title="held-out accuracy by schedule, %")
    stages = [
        (name, item) for label, name in _SHORT.items() if (item := history.final(label)) and len(item.schedules) > 1
    ]
    table.add_column("denoising")
    for name, _ in stages:
        table.add_column(name, justify="right")
    for name in names:
        table.add_row(name, *(_schedule_cell(item, name) for _, item in stages))
    return table


def _schedule_cell(item: Evaluation, name: str) -> str:
    """The accuracy, with the steps that it took where the schedule's name does not say how many."""
    found = item.schedules.get(name)
    if found is None:
        return ""
    steps = "" if name[0].isdigit() else f" in {found.mean_steps:.1f} steps"
    return f"{100 * found.score.accuracy:.1f}{steps}"


def schedule_names(evaluations: Iterable[Evaluation]) -> list[str]:
    """Those that were asked for. Steps first, ascending; then the others, as the recipe names them."""
    names = dict.fromkeys(name for item in evaluations for name in item.schedules)
    return sorted(names, key=lambda name: int(name.split()[0]) if name[0].isdigit() else math.inf)


def score_text(score: Score) -> str:
    """`31.2 % (27.3 to 35.4), 156 of 500`."""
    low, high = score.interval
    counts = f"{score.num_correct} of {score.num_problems}"
    return f"{100 * score.accuracy:.1f} % ({100 * low:.1f} to {100 * high:.1f}), {counts}"


def _rows(history: RunHistory) -> Iterator[_Row]:
    trained = "SFT + RL" if history.final("sft") else NAMES["rl"]
    control = NAMES["control"] if history.planned.get("control") else f"{NAMES['control']}, same seconds"
    for label, name in (NAMES | {"rl": trained, "control": control}).items():
        evaluation = history.final(label)
        if evaluation is not None:
            unit = "rounds" if label == "rl" else "steps"
            yield _Row(name=name, evaluation=evaluation, phase_end=history.phase_ends.get(label), unit=unit)
