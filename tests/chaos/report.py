"""Report of a session: a Markdown table of faults and recovery times, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from tests.chaos.faults import FaultOutcome
from tests.chaos.record import InjectedFault, RunRecord
from tests.chaos.session import SessionResult

_HEAD = ("target", "fault", "trigger", "times", *FaultOutcome, "median s", "max s")


def markdown(records: Sequence[RunRecord]) -> str:
    """Return a table with a row per target, kind and trigger. Seconds are recovery times."""
    cases: dict[tuple[str, str, str], list[InjectedFault]] = {}
    for injected in (injected for record in records for injected in record.injected):
        fault = injected.fault
        cases.setdefault((fault.target, fault.kind, fault.trigger), []).append(injected)
    rows = [_HEAD, ("---",) * len(_HEAD), *((*case, *_numbers(injected)) for case, injected in sorted(cases.items()))]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def as_json(seed: int, result: SessionResult) -> dict[str, Any]:
    """Return all findings of a session."""
    faults = [
        {"run": record.name, **asdict(injected.fault), **(asdict(injected) | {"fault": str(injected.fault)})}
        for record in result.records
        for injected in record.injected
    ]
    return {"seed": seed, "faults": faults, "skipped": result.skipped, "violations": result.violations}


def _numbers(injected: Sequence[InjectedFault]) -> tuple[str, ...]:
    seconds = [one.recovery_s for one in injected if one.recovery_s is not None]
    counts = (sum(one.outcome is outcome for one in injected) for outcome in FaultOutcome)
    times = (f"{median(seconds):.1f}", f"{max(seconds):.1f}") if seconds else ("", "")
    return str(len(injected)), *(str(count or "") for count in counts), *times
