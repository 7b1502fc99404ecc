"""The result of a run: held-out accuracy after each stage, with what each stage cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.run_log import Event
from deploy.history import Evaluation, RunHistory, read_history
from deploy.printing import duration, printable
from rollout.score import Score

if TYPE_CHECKING:
    from rich.table import Table

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


def result_table(events: Iterable[Event]) -> Table:
    """A row for each stage that was evaluated."""
    from rich.table import Table
    from rich.text import Text

    history = read_history(events)
    table = Table(title=Text(printable(history.name)), caption=f"{duration(history.seconds)} in all")
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for row in _rows(history):
        table.add_row(*row.cells())
    return table


def result_markdown(events: Iterable[Event]) -> str:
    """The same table for a README."""
    history = read_history(events)
    rule = ["---", *["---:"] * (len(_HEADINGS) - 1)]
    lines = [_HEADINGS, rule, *(row.cells() for row in _rows(history))]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{table}\n\n{duration(history.seconds)} in all.\n"


def score_text(score: Score) -> str:
    """`31.2 % (27.3 to 35.4), 156 of 500`."""
    low, high = score.interval
    counts = f"{score.num_correct} of {score.num_problems}"
    return f"{100 * score.accuracy:.1f} % ({100 * low:.1f} to {100 * high:.1f}), {counts}"


def _rows(history: RunHistory) -> Iterator[_Row]:
    trained = "SFT + RL" if history.final("sft") else "RL"
    control = "control: more SFT" if history.planned.get("control") else "control: more SFT, same seconds"
    names = {"untrained": "untrained", "start": "start", "sft": "SFT", "rl": trained, "control": control}
    for label, name in names.items():
        evaluation = history.final(label)
        if evaluation is not None:
            unit = "rounds" if label == "rl" else "steps"
            yield _Row(name=name, evaluation=evaluation, phase_end=history.phase_ends.get(label), unit=unit)
