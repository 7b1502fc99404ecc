"""What a session measured: a table for people, JSON for programs, Markdown for docs/reliability.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from deploy.chaos.expectations import FaultOutcome
from deploy.chaos.record import Blow
from deploy.chaos.session import ChaosVerdict

_HEADS = ("what fails", "how", "when", "times", "went on", "resumed", "stuck", "median s", "max s")


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultRow:
    """All faults of one kind."""

    target: str
    """What failed."""
    harm: str
    """How."""
    moment: str
    """When."""
    times: int
    """How often."""
    went_on: int
    """How often the same `d1 train` went on."""
    resumed: int
    """How often it ended, and `--resume` went on."""
    stuck: int
    """How often it had to be killed."""
    median_s: float | None
    """Median seconds until the role was back and the run made progress; None when it never did."""
    max_s: float | None
    """The longest."""

    @property
    def cells(self) -> tuple[str, ...]:
        """As text, for a table."""
        numbers = (self.times, self.went_on, self.resumed, self.stuck)
        seconds = ("" if value is None else f"{value:.1f}" for value in (self.median_s, self.max_s))
        return self.target, self.harm, self.moment, *(str(number or "") for number in numbers), *seconds


def rows(verdict: ChaosVerdict) -> list[FaultRow]:
    """One for each kind of fault that was carried out."""
    kinds: dict[tuple[str, str, str], list[Blow]] = {}
    for record in verdict.records:
        for blow in record.blows:
            fault = blow.fault
            kinds.setdefault((fault.target, fault.harm, fault.moment), []).append(blow)
    return [_row(kind, blows) for kind, blows in sorted(kinds.items())]


def table(verdict: ChaosVerdict) -> Table:
    """For a terminal."""
    shown = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for head in ("what is done", "when"):
        shown.add_column(head, no_wrap=True)
    # 80 columns are enough.
    for head in ("times", "on", "resumed", "stuck", "median s", "max s"):
        shown.add_column(head, no_wrap=True, justify="right")
    for row in rows(verdict):
        target, harm, *others = row.cells
        shown.add_row(f"{harm} {target}", *others)
    return shown


def markdown(verdict: ChaosVerdict) -> str:
    """The same for a document."""
    lines = [_HEADS, tuple("---" for _ in _HEADS), *(row.cells for row in rows(verdict))]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_json(verdict: ChaosVerdict) -> dict[str, Any]:
    """Everything that a session found."""
    return {
        "table": [asdict(row) for row in rows(verdict)],
        "faults": [_fault(record.name, blow) for record in verdict.records for blow in record.blows],
        "skipped": list(verdict.skipped),
        "violations": list(verdict.violations),
    }


def _fault(run: str, blow: Blow) -> dict[str, Any]:
    facts = asdict(blow)
    return {"run": run, **facts.pop("fault"), **facts}


def _row(kind: tuple[str, str, str], blows: Sequence[Blow]) -> FaultRow:
    seconds = [blow.back_after_s for blow in blows if blow.back_after_s is not None]
    count = {outcome: sum(blow.outcome is outcome for blow in blows) for outcome in FaultOutcome}
    target, harm, moment = kind
    return FaultRow(
        target=target,
        harm=harm,
        moment=moment,
        times=len(blows),
        went_on=count[FaultOutcome.WENT_ON],
        resumed=count[FaultOutcome.RESUMED],
        stuck=count[FaultOutcome.STUCK],
        median_s=round(median(seconds), 1) if seconds else None,
        max_s=round(max(seconds), 1) if seconds else None,
    )
